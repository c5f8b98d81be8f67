"""Where measures are taken: scratch databases, how much to do there, and what may be started."""

from dataclasses import dataclass

from pgqueue.bench.scratch import Scratch


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is done. `jobs` is the size of a drain; `seconds` is how long what runs for a time runs."""

    jobs: int = 100_000
    seconds: float = 4.0

    @property
    def backlog(self) -> int:
        """Jobs of a deep backlog."""
        return 10 * self.jobs

    @property
    def finished(self) -> int:
        """Jobs of a big history."""
        return 20 * self.jobs

    @property
    def few(self) -> int:
        """Jobs of what is done one batch at a time."""
        return max(self.jobs // 5, 100)


@dataclass(frozen=True, slots=True)
class Site:
    """What a variant is given."""

    scratch: Scratch
    sizes: Sizes
