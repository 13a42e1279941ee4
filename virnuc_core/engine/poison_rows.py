"""Finding the row that ends workers, by halving, without ever accusing an innocent one.

A worker may also be killed from outside. So a row is set aside only when it has ended `PROOFS` workers all alone, and a
search in which every part survives clears the shard, which is then simply computed again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from virnuc_core.engine.messages import ShardTask
from virnuc_core.errors import ShardError

PROOFS: Final = 2
MAX_SEARCHES: Final = 3  # in vain, before the shard is given up
MAX_GUILTY: Final = 16  # of one shard: more is not a poisoned row but a broken machine


@dataclass(slots=True)
class Search:
    """The search within one shard. Each answer says what to do next."""

    whole: ShardTask
    guilty: list[int] = field(default_factory=list)
    _waiting: list[tuple[int, int]] = field(default_factory=list)  # parts still to be probed, next last
    _alone: int = 0  # deaths of the single row under suspicion
    _found: bool = False
    _in_vain: int = 0

    def begin(self, said: str) -> ShardTask:
        """Start, or start again; `ShardError` when the shard cannot be cleared."""
        if self._in_vain >= MAX_SEARCHES or len(self.guilty) > MAX_GUILTY:
            raise ShardError(
                f"ends workers, and no single row of it is the cause; last words: {said}", shard=self.whole.shard
            )
        self._found = False
        lo, hi = self.whole.lo, self.whole.hi
        return self._probe(lo, hi) if hi - lo == 1 else self._halve(lo, hi)

    def ended(self, task: ShardTask) -> ShardTask:
        """A worker died at this probe."""
        if task.hi - task.lo > 1:
            self._waiting.clear()  # the row is in here; what is outside is looked at when the shard runs again
            return self._halve(task.lo, task.hi)
        self._alone += 1
        if self._alone < PROOFS:
            return self._probe(task.lo, task.hi)
        self.guilty.append(task.lo)
        self._found, self._alone = True, 0
        return self._verdict()

    def survived(self, task: ShardTask) -> ShardTask:
        """A worker computed this probe."""
        self._alone = 0
        if self._waiting:
            return self._probe(*self._waiting.pop())
        return self._verdict()

    def _halve(self, lo: int, hi: int) -> ShardTask:
        middle = (lo + hi) // 2
        self._waiting.append((middle, hi))
        return self._probe(lo, middle)

    def _probe(self, lo: int, hi: int) -> ShardTask:
        skip = tuple(row for row in self.guilty if lo <= row < hi)
        return self.whole.model_copy(update={"lo": lo, "hi": hi, "skip": skip, "probe": True})

    def _verdict(self) -> ShardTask:
        """The shard again, without the rows found guilty."""
        self._in_vain = 0 if self._found else self._in_vain + 1
        self._waiting.clear()
        self.whole = self.whole.model_copy(update={"skip": tuple(sorted(self.guilty))})
        return self.whole
