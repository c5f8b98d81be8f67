"""The chaos run: break a running queue in every way that production does, and prove that nothing is lost.

    python -m pgqueue.bench.chaos --minutes 30 --jobs 300000 --seed 1 [--json FILE] [--svg FILE]

It starts a PostgreSQL of its own, workers, an API and producers as processes, and injects faults by a plan made from
the seed (`plan`), one at a time and mixed. Producers and tasks write what they were told and did to files of their own
(`ledger`); in the end `checker` compares these with the final tables, and `report` says what was injected, what was
found and for how long nothing was done. The exit code is 1 when a promise was broken.

Workers, each 30 jobs at once under leases of three seconds: one connects directly, one through a TCP proxy
(`proxy`) that cuts, delays and swallows, one through PgBouncer in transaction mode and one whose clock is an hour off.
What this machine does not offer is left out and told: PgBouncer and libfaketime (Debian's packages of these names), and
a small file system to fill, which root alone can mount.
"""
