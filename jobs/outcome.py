"""How an attempt ends: frozen values that the executor writes into the database."""

import hashlib
import re
import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from types import TracebackType
from typing import Protocol, cast, runtime_checkable

__all__ = [
    "MAX_DELAY_SECONDS",
    "SUCCEEDED",
    "Again",
    "Committed",
    "End",
    "ErrorInfo",
    "FollowUp",
    "Hold",
    "Outcome",
    "OutcomeName",
    "place_of",
    "storable",
]

MAX_DELAY_SECONDS = 366 * 86_400.0
_MESSAGE_CHARACTERS = 4_000
_PLACE_CHARACTERS = 400
_OF_A_GROUP = 10  # errors of an exception group that are told
_VOLATILE = re.compile(  # a UUID first: its parts would match as well, and leave some of its letters
    r"\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"
    r"|0x[0-9a-fA-F]+|\b[0-9a-fA-F]{8,}\b|\d+|'[^']*'|\"[^\"]*\""
)


# What calls pass through on their way to a handler, and from it to what Sidings stands on.
_ON_THE_WAY = sys.stdlib_module_names | {"aiokafka", "asyncpg", "opentelemetry", "pydantic", "sidings", "tenacity"}


def place_of(error: BaseException) -> str:
    """Where in its own code a handler was when it raised `error`, or its cause: " (carrier.tracker:41 in send_eta)".
    That is the innermost frame of the package to which Sidings passed the call, behind its middleware, so it is none of
    the libraries that the handler calls. Empty where there is none, as for an error that was returned."""
    return _place_in(error.__traceback__) or (_place_in(error.__cause__.__traceback__) if error.__cause__ else "")


def _place_in(step: TracebackType | None) -> str:
    place, package = "", ""
    while step is not None:
        module, code = str(step.tb_frame.f_globals.get("__name__")), step.tb_frame.f_code
        top = module.partition(".")[0]
        if top == "sidings" and not module.startswith("sidings.examples."):
            package = ""
        elif top not in _ON_THE_WAY or top == "sidings":
            package = package or top
            if top == package:
                place = f" ({module}:{step.tb_lineno} in {code.co_name})"
        step = step.tb_next
    return place


class OutcomeName(StrEnum):
    """The value of `job_history.outcome`; equal to the SQL type ``sidings.outcome``, which a test holds."""

    SUCCEEDED = "succeeded"
    RETRIED = "retried"
    SNOOZED = "snoozed"
    DISCARDED = "discarded"
    FOLLOWED = "followed"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"
    LOST = "lost"
    HELD = "held"

    @property
    def terminal(self) -> bool:
        """Whether the job is gone after it. Every job ends in exactly one terminal outcome."""
        return self in (
            OutcomeName.SUCCEEDED,
            OutcomeName.DISCARDED,
            OutcomeName.FOLLOWED,
            OutcomeName.CANCELLED,
            OutcomeName.SUPERSEDED,
        )


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error as the history keeps it.

    Attributes:
        error_class: Its class, with the module unless that is ``builtins``.
        message: At most 4,000 characters, no NUL; of an exception group also what is in it.
        fingerprint: Equal for errors that differ only in numbers, ids and quoted values.
        place: Where a handler raised it, if that is known.
    """

    error_class: str
    message: str
    fingerprint: str
    place: str = ""

    @classmethod
    def of(cls, error: BaseException) -> "ErrorInfo":
        """Describe `error`, whatever its class does when it is asked for its name or its text."""
        kind = type(error)
        try:
            name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - an error that cannot be named is still to be recorded
            name = type.__getattribute__(kind, "__name__")
        try:
            # Of a subclass as well, a plain one; without a look at each of millions of characters.
            message = str.__getitem__(str(error), slice(_MESSAGE_CHARACTERS))
            if isinstance(error, BaseExceptionGroup):  # whose own text only counts them
                group = cast(BaseExceptionGroup[BaseException], error)
                parts = [cls.of(each).at(place_of(each)) for each in group.exceptions[:_OF_A_GROUP]]
                message += ": " + "; ".join(f"{part.error_class}: {part.text}" for part in parts)
        except KeyboardInterrupt:
            raise
        except BaseException as broken:  # noqa: BLE001 - so is one that cannot be shown
            message = f"its text cannot be shown: {type(broken).__name__}"
        return cls.from_text(name, message)

    @classmethod
    def from_text(cls, error_class: str, message: str) -> "ErrorInfo":
        name, clean = _storable(error_class), _storable(message)
        shape = _VOLATILE.sub("?", f"{name}: {clean}")
        return cls(name, clean, hashlib.sha256(shape.encode()).hexdigest()[:16])

    def at(self, place: str) -> "ErrorInfo":
        """The same, raised there."""
        return replace(self, place=_storable(place)[:_PLACE_CHARACTERS])

    @property
    def text(self) -> str:
        """The message, and behind it the place: what is recorded and logged."""
        return self.message[: _MESSAGE_CHARACTERS - len(self.place)] + self.place

    def within(self, characters: int) -> str:
        """Class, message and place; where they have more characters, the message is cut short, not the place."""
        return f"{self.error_class}: {self.message}"[: characters - len(self.place)] + self.place


def storable(text: str, characters: int) -> str:
    """The first `characters` of an error text as Postgres can store them: neither NUL nor lone surrogates."""
    return text[:characters].replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


def _storable(text: str) -> str:
    """One bad error text must not stall a cycle."""
    return storable(text, _MESSAGE_CHARACTERS)[:_MESSAGE_CHARACTERS]


@runtime_checkable
class FollowUp(Protocol):
    """What a cycle has to know of the `JobType` whose job follows one that is given up."""

    name: str
    policy: int
    grouped: bool


@dataclass(frozen=True, slots=True)
class End:
    """The job is over and leaves the table. follow_up: of this type a job is stored with its payload, at once."""

    name: OutcomeName
    error: ErrorInfo | None = None
    follow_up: FollowUp | None = None


@dataclass(frozen=True, slots=True)
class Again:
    """The job runs again in `delay` seconds. A serial job keeps its place and holds its group until then.

    inconclusive: the executor has cut the attempt off, or it has not begun: a job that may have killed an executor is
    no less suspect after it.

    Raises `ValueError` for a delay that Postgres would refuse, and with it the cycle that is to record it.
    """

    name: OutcomeName
    delay: float
    error: ErrorInfo | None = None
    inconclusive: bool = False

    def __post_init__(self) -> None:
        real = isinstance(self.delay, int | float)  # pyright: ignore[reportUnnecessaryIsInstance] - a user's own `Snooze`
        if not real or not 0 <= self.delay <= MAX_DELAY_SECONDS:
            raise ValueError(f"a job cannot run again in {self.delay!r} seconds")


@dataclass(frozen=True, slots=True)
class Hold:
    """The job waits for a person's decision, with `reason`. It leaves its group, unless it `blocks` it."""

    reason: str
    error: ErrorInfo | None = None
    name: OutcomeName = OutcomeName.HELD
    blocks: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """The job has been ended by its handler's own transaction (or by somebody else's): nothing is left to record."""

    name: OutcomeName = OutcomeName.SUCCEEDED
    error: ErrorInfo | None = None


Outcome = End | Again | Hold | Committed
SUCCEEDED = End(OutcomeName.SUCCEEDED)
