"""The failover run: lose the primary of a pair again and again, and prove that no accepted job is lost.

    python -m pgqueue.bench.failover --rounds 20 [--patroni] [--json FILE]

It starts two PostgreSQL servers of its own that replicate synchronously, and producers and workers that know both by
one DSN with several hosts. Each round takes the primary away, by kill -9 or by stopping it so that it hangs, promotes
the standby, and takes the lost one back as its standby (`pair`). With --patroni both are run by Patroni, which decides
by itself (`patroni`). In the end every job that a producer was told is accepted must be there, and have been run.

What is told: how long no job was accepted, from the fault and from the promotion on, and how long none was completed.
"""
