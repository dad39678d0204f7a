"""The HTTP interface: tasks, named leases, the generator, health and metrics. Needs the extra `http`; nothing else imports it.

`server` and `hosting` run it, `gate` lets requests in, `app` puts the routes together; `coalescing` turns many requests into few
statements.
"""
