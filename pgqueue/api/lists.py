"""Lists that page by cursor: what they take, and how a page is cut from what was found."""

from collections.abc import Callable
from typing import Annotated, Final, TypeAlias, TypeVar
from uuid import UUID

from litestar.params import QueryParameter

T = TypeVar("T")
C = TypeVar("C")
_CURSOR: Final = "next_cursor of the page before."

Limit: TypeAlias = Annotated[int, QueryParameter(ge=1, le=1000)]
#: So few are in most lists of names that a page has them all.
NAMES: Final = 1000
JobCursor: TypeAlias = Annotated[UUID | None, QueryParameter(description=_CURSOR)]
NameCursor: TypeAlias = Annotated[
    str | None, QueryParameter(description=_CURSOR, pattern=r"^[^\x00]*$", max_length=256)
]
#: When a worker started, in microseconds, and its id: no time in text, whose + a link would lose.
WorkerCursor: TypeAlias = Annotated[
    str | None,
    QueryParameter(description=_CURSOR, pattern=r"^[0-9]{1,17}-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"),
]


def page_of(found: list[T], limit: int, cursor_of: Callable[[T], C]) -> tuple[list[T], C | None]:
    """Return `limit` of what was found, one more if there was, and the cursor of the next page or None."""
    return found[:limit], cursor_of(found[limit - 1]) if len(found) > limit else None
