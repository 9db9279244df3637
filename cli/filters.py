"""Times, states and outcomes as people write them."""

import re
from collections.abc import Sequence
from datetime import datetime, timedelta

from ..errors import ConfigurationError

__all__ = ["NAMES", "a_state", "a_time", "check_group", "check_words", "outcome_names", "state_names"]

NAMES = "`sidings types list` and `sidings origins list` have the names"
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def a_time(option: str, text: str | None, now: datetime) -> datetime | None:
    """'90s', '30m', '2h' or '7d' ago, or an ISO time with its zone. Raises `ConfigurationError`."""
    if text is None:
        return None
    try:
        if found := re.fullmatch(r"(\d{1,6})\s*([smhd])", text.strip()):
            return now - timedelta(**{_UNITS[found[2]]: int(found[1])})
        time = datetime.fromisoformat(text.strip())
    except (ValueError, OverflowError):  # the latter: before the year 1
        time = None
    if time is None or time.tzinfo is None:
        raise ConfigurationError(f"{option} {text!r}: give 30m, 2h or 7d (ago), or a time such as 2026-05-01T03:00Z")
    return time


def a_state(text: str | None) -> str | None:
    """A state as the shell likes it: 'backing-off' is 'backing off'. Raises `ConfigurationError`."""
    if text is None:
        return None
    name = text.lower().replace(" ", "-").replace("_", "-")
    if name not in state_names():
        names = ", ".join(state_names())
        raise ConfigurationError(f"--state {text!r}: give {names}; `sidings jobs ended` has those that have ended")
    return name.replace("-", " ")


def check_group(origin: str | None, group: str | None) -> None:
    """Raise `ConfigurationError` for a group of no origin: one name may stand in several of them."""
    if group is not None and origin is None:
        raise ConfigurationError(f"--group {group!r} needs --origin; docs/operations.md has the query that finds it")


def check_words(option: str, words: Sequence[str] | None, known: Sequence[str]) -> None:
    """Raise `ConfigurationError` unless all are among those that there are."""
    for word in words or ():
        if word not in known:
            raise ConfigurationError(f"{option} {word!r}: give some of {', '.join(known)}")


def state_names() -> list[str]:
    """For shell completion, which must not wait for an import: those of `JobState`."""
    return ["waiting", "backing-off", "blocked", "running", "delayed", "held"]


def outcome_names() -> list[str]:
    """For shell completion too: those that `requeue` can bring back."""
    return ["discarded", "followed", "cancelled", "superseded"]
