"""How far a directory has read its topic, and how far it has to: pure, no I/O, no clock."""

from collections.abc import Mapping

__all__ = ["Progress"]

_SHOWN = 10  # partitions named in a message


class Progress:
    """positions: the next offset of each partition; what is before has been applied. ends: of what is committed, as
    Kafka last told them; tails: of the log, also behind transactions that are open. barrier: what the positions have to
    reach, once it is known."""

    def __init__(self) -> None:
        self.positions: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.tails: dict[int, int] = {}
        self.barrier: dict[int, int] | None = None

    @property
    def reached(self) -> bool:
        """Whether every position has reached the barrier. Positions, not counts: markers of transactions, aborted
        records and what compaction has taken are offsets without a record."""
        return self.barrier is not None and self.has(self.barrier)

    def has(self, wanted: Mapping[int, int]) -> bool:
        """Whether all positions are there."""
        return all(self.positions.get(partition, -1) >= offset for partition, offset in wanted.items())

    def may_have(self, wanted: Mapping[int, int]) -> bool:
        """Whether the log is as long, as far as is known."""
        return all(self.tails.get(partition, 0) >= offset for partition, offset in wanted.items())

    @property
    def beyond_the_log(self) -> bool:
        """Whether, as far as is known, all of a partition is read and it ends before the barrier: it was cut off."""
        return any(
            self.tails.get(partition, 0) < offset and self.has({partition: self.ends.get(partition, offset)})
            for partition, offset in (self.barrier or {}).items()
        )

    def lower_barrier(self, ends: Mapping[int, int]) -> bool:
        """No position gets further than these ends, which are those of now. Returns whether it was beyond them."""
        before = self.barrier
        if before is not None:
            self.barrier = {p: min(offset, ends.get(p, 0)) for p, offset in before.items()}
        return self.barrier != before

    def missing(self, wanted: Mapping[int, int]) -> dict[int, tuple[int, int]]:
        """Partitions that are not there: where they are, and where they should be."""
        return {
            partition: (self.positions.get(partition, 0), offset)
            for partition, offset in sorted(wanted.items())
            if self.positions.get(partition, -1) < offset
        }

    def describe(self, wanted: Mapping[int, int] | None) -> str:
        """What is missing, for a person: ``partition 0 at 10 of 20, partition 1 at 5 of 7``."""
        if wanted is None:
            return "its end offsets are not known yet"
        missing = self.missing(wanted)
        shown = [f"partition {p} at {at} of {end}" for p, (at, end) in list(missing.items())[:_SHOWN]]
        more = [f"{len(missing) - _SHOWN} more"] if len(missing) > _SHOWN else []
        return ", ".join([*shown, *more]) or "nothing is missing"

    @property
    def fraction(self) -> float:
        """How much of the way to the barrier is done, from 0 to 1."""
        if self.barrier is None:
            return 0.0
        whole = sum(self.barrier.values())
        if whole == 0:
            return 1.0
        return sum(min(self.positions.get(p, 0), end) for p, end in self.barrier.items()) / whole
