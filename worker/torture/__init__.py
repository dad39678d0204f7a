"""`worker torture`: real daemons under load, faults injected on purpose, and a checker that trusts what the database wrote down.

`plan` decides what is done (a function of the seed), `faults` and `server_faults` do it, `job_rules`, `end_rules`, `other_rules`
and `timing` judge the recorded history; those four touch nothing and can be read, and tested, by themselves.
"""
