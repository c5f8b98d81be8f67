"""The REST API: `create_app` for an app of its own, `PgqueuePlugin` for a Litestar app of yours."""

from pgqueue.api.app import create_app
from pgqueue.api.config import ApiConfig
from pgqueue.api.plugin import PgqueuePlugin

__all__ = ["ApiConfig", "PgqueuePlugin", "create_app"]
