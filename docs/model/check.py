"""What a check is: a right protocol, which must hold, or a seeded bug, which must be caught."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from explore import Model

__all__ = ["FULL", "NORMAL", "QUICK", "Check"]

QUICK, NORMAL, FULL = 0, 1, 2  # how much time one has


@dataclass(frozen=True)
class Check:
    """One line of the report. breaks: the property that a seeded bug violates; empty for a right protocol.
    walks: so many random walks, each of at most 300 steps, instead of a search of all states."""

    name: str
    model: Callable[[], Model[Any]]
    breaks: str = ""
    tier: int = QUICK
    limit: int = 1_000_000
    walks: int = 0
