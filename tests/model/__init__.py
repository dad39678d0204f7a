"""The protocol as three small models, and the checker that visits every state of them (docs/guarantees.md).

    statements   what each SQL statement does to a row; tests/test_model.py holds it to the real statements, row by row
    jobs         processes, lost connections, crashes and an operator around one job, without any clock
                 (world: its parts, job_promises: what must hold)
    trust        the two clocks: how long a process may believe in a lease
    names        named leases, and a resource behind check_fence

`python -m tests.model` runs them, sound and broken on purpose, and shows the shortest way into each breach.
"""
