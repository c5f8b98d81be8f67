"""${message}."""

from pgqueue.schema import frozen

revision, down_revision = ${repr(up_revision)}, ${repr(down_revision)}
upgrade, downgrade = frozen(__file__)
