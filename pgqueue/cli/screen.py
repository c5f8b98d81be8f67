"""A full-screen page that is drawn anew now and then and listens to single keys."""

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

#: What terminals send for keys without a character, by the names used here.
_SEQUENCES: Final = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[Z": "back-tab",
    b"\x1b[5~": "page-up",
    b"\x1b[6~": "page-down",
    b"\t": "tab",
    b"\r": "enter",
    b"\n": "enter",
    b"\x1b": "escape",
    b"\x03": "q",
}


class Keyboard:
    """Reads single keys from a terminal."""

    def __init__(self, fd: int) -> None:
        """`fd` is the terminal's, set to give keys at once."""
        self._fd = fd
        self._unread = b""

    def read(self, seconds: float) -> str | None:
        """Return the next key, by name or as its character; None when none was pressed within `seconds`."""
        if not self._unread:
            ready, _, _ = select.select([self._fd], [], [], max(seconds, 0.0))
            if not ready:
                return None
            self._unread = os.read(self._fd, 1024)
            if not self._unread:
                return "q"
        for length in (4, 3, 1):
            name = _SEQUENCES.get(self._unread[:length])
            if name is not None:
                self._unread = self._unread[length:]
                return name
        text = self._unread.decode(errors="ignore")
        first = text[:1]
        self._unread = self._unread[len(first.encode()) or 1 :]
        return first or None


@contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Give the keyboard of the terminal at stdin, which is as it was afterwards."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield Keyboard(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
