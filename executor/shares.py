"""How many workers a slow type of jobs may have, so that it leaves some to the others.

Where a carrier lets each call run into its timeout, its jobs would soon keep all workers, and no other job would start
until one of these calls has ended. So of each slow type no more start as soon as it has four times as many workers as
are left beside all slow ones: one keeps four fifths of them at most, two keep four ninths each. Source: Choudhury and
Hahne, "Dynamic queue length thresholds for shared-memory packet switches" (IEEE/ACM Transactions on Networking, 1998).
"""

from collections.abc import Mapping, Sequence

__all__ = ["TIMES_THE_REST", "shares", "too_many"]

TIMES_THE_REST = 4  # a service of one type, and of parked messages, has four fifths of its workers for it


def shares(workers: int, held: Mapping[str, int]) -> dict[str, int]:
    """How many more jobs of each slow type may start; negative: how many fewer should have. workers: of the executor.
    held: the slow types, and how many workers each keeps, or is about to."""
    rest = workers - sum(held.values())
    # One after the other may start while it has less than that: `held + n < times * (rest - n)`.
    return {type: -((count - TIMES_THE_REST * rest) // (TIMES_THE_REST + 1)) for type, count in held.items()}


def too_many(workers: int, held: dict[str, int], claimed: Sequence[str]) -> list[bool]:
    """Which claimed jobs are to be given back, the last ones first. held: as above, the claimed among them, and without
    those that are given back afterwards; claimed: their types. One after the other is looked at: each that goes leaves
    a worker more to the other types."""
    rest = workers - sum(held.values())
    back = [False] * len(claimed)
    for place in reversed(range(len(claimed))):
        type = claimed[place]
        if type in held and held[type] - 1 >= TIMES_THE_REST * (rest + 1):
            held[type] -= 1
            rest += 1
            back[place] = True
    return back
