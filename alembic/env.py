"""Alembic's entry: online on the connection it is handed or on PGQUEUE_DSN, offline as text."""

import os

from alembic import context

from pgqueue import schema

if context.is_offline_mode():
    schema.print_revisions(context)
elif (handed := context.config.attributes.get("connection")) is not None:
    schema.run_revisions(context, handed)
else:
    with schema.exclusively(os.environ["PGQUEUE_DSN"]) as connection:
        schema.run_revisions(context, connection)
