"""The queue."""

from pgqueue.schema import frozen

revision, down_revision = "0001", None
upgrade, downgrade = frozen(__file__)
