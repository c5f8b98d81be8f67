"""`pgqueue bench`: what the queue does on a server, in numbers.

Everything runs in databases of its own on the configured server (`scratch`), with the default worker as a user would
start it. A measure (`measures/`) has variants; all variants of all measures run once, then again (`run`), so that what
else happens on the machine meets all of them; what is told are medians. Figures are data (`figures`) that `report`
and `plot` show. `compare` and `peer` put pgqueue beside other queues.
"""
