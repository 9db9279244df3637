"""Which of a transaction's rows have come: a set of numbers that is small while they are dense."""

from bisect import bisect_left
from collections.abc import Iterator

__all__ = ["Ordinals"]


class Ordinals:
    """A set of positive numbers, kept as sorted ranges. `str()` and `Ordinals(text)` write and read it: ``1-5,8``."""

    def __init__(self, text: str = "") -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []  # inclusive
        for part in text.split(",") if text else []:
            start, _, end = part.partition("-")
            self._starts.append(int(start))
            self._ends.append(int(end or start))
        self._count = sum(self._ends) - sum(self._starts) + len(self._starts)

    def __str__(self) -> str:
        return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(self._starts, self._ends, strict=True))

    def __len__(self) -> int:
        return self._count

    @property
    def highest(self) -> int:
        """The largest of them; 0 when there is none."""
        return self._ends[-1] if self._ends else 0

    def add(self, number: int) -> bool:
        """Put it in; whether it was new."""
        at = bisect_left(self._ends, number)  # the first range that ends there or later
        if at < len(self._starts) and self._starts[at] <= number:
            return False
        joins_left = at > 0 and self._ends[at - 1] == number - 1
        joins_right = at < len(self._starts) and self._starts[at] == number + 1
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends.pop(at)
            self._starts.pop(at)
        elif joins_left:
            self._ends[at - 1] = number
        elif joins_right:
            self._starts[at] = number
        else:
            self._starts.insert(at, number)
            self._ends.insert(at, number)
        self._count += 1
        return True

    def missing(self, last: int) -> Iterator[int]:
        """Those of 1 to `last` that are not in it, in order."""
        expected = 1
        for start, end in zip(self._starts, self._ends, strict=True):
            yield from range(expected, min(start, last + 1))
            expected = end + 1
        yield from range(expected, last + 1)
