"""What a failed command says, and the exit code it says it with."""

from pgqueue.cli.codes import FAILURE, UNREACHABLE
from pgqueue.cli.output import note
from pgqueue.embedded import EmbeddedError
from pgqueue.errors import PgqueueError


def exit_code(exc: Exception) -> int:
    """Return the exit code of a command that ended with this error."""
    if isinstance(exc, EmbeddedError):
        return UNREACHABLE
    return exc.exit_code if isinstance(exc, PgqueueError) else FAILURE


def report(exc: Exception) -> int:
    """Say on stderr what went wrong and return the exit code; an error that is not pgqueue's own goes on as it is."""
    if not isinstance(exc, PgqueueError):
        raise exc
    note(f"pgqueue: {exc}")
    return exit_code(exc)
