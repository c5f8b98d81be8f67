"""The exit codes of the command line."""

from typing import Final

OK: Final = 0
FAILURE: Final = 1
USAGE: Final = 2
NOT_FOUND: Final = 3
CONFLICT: Final = 4
UNHEALTHY: Final = 5
TIMEOUT: Final = 6
UNREACHABLE: Final = 7
INTERRUPTED: Final = 130
