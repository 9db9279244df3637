"""Times, states and outcomes as people write them."""

import re
from datetime import datetime, timedelta

from ..errors import ConfigurationError

__all__ = ["a_state", "a_time", "outcome_names", "state_names"]

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def a_time(option: str, text: str | None, now: datetime) -> datetime | None:
    """'90s', '30m', '2h' or '7d' ago, or an ISO time with its zone. Raises `ConfigurationError`."""
    if text is None:
        return None
    if found := re.fullmatch(r"(\d{1,6})\s*([smhd])", text.strip()):
        return now - timedelta(**{_UNITS[found[2]]: int(found[1])})
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise ConfigurationError(f"{option} {text!r}: give 30m, 2h or 7d (ago), or a time such as 2026-05-01T03:00Z")
    return time


def a_state(text: str | None) -> str | None:
    """A state as the shell likes it: 'backing-off' is 'backing off'."""
    return None if text is None else text.replace("-", " ").replace("_", " ")


def state_names() -> list[str]:
    """For shell completion, which must not wait for an import: those of `JobState`."""
    return ["waiting", "backing-off", "blocked", "running", "delayed", "held"]


def outcome_names() -> list[str]:
    """For shell completion too: those that `requeue` can bring back."""
    return ["discarded", "cancelled", "superseded"]
