"""`worker bench`: measures what this version does on the user's own database, in schemas of its own that it removes.

Each scenario is one file with one `measure`; `running` is what they share: daemons that are real `worker run` processes, and one
measured run. Cases that are compared are interleaved, turn by turn, since the speed of a machine drifts.
"""
