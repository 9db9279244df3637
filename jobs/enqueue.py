"""What is stored for a job, checked before anything is written. How it is sent is the business of `connections`."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import NamedTuple

from ..errors import EnqueueError, MissingOrigin
from .connections import Statement
from .context import missing_headers, work_origin
from .job import IDEMPOTENCY_KEY
from .outcome import MAX_DELAY_SECONDS

__all__ = [
    "AT_ONCE",
    "UNSET",
    "Kind",
    "ManyHeaders",
    "Unset",
    "When",
    "headers_of_each",
    "headers_text",
    "homeless",
    "kind_of",
    "many_jobs",
    "one_job",
    "possible_origin",
    "short",
    "when",
]

_MAX_NAME_BYTES = 1_000  # an index entry must fit (2,704 bytes): origin and group stand in one
_ORIGIN = re.compile(r"[a-zA-Z0-9._-]{1,249}/(0|[1-9][0-9]{0,9})")
_SEPARATOR = "\x1f"  # stands in no name, and in no JSON: there control characters are escaped
# What lies beyond cannot be turned into UTC; asyncpg takes the ends themselves for infinity.
_MIN, _MAX = datetime.min.replace(tzinfo=UTC) + timedelta(days=1), datetime.max.replace(tzinfo=UTC) - timedelta(days=1)


ManyHeaders = Mapping[str, str] | Sequence[Mapping[str, str] | None]  # of all jobs, or of each


class Unset:
    """The type of `UNSET`: "not given", where None has a meaning of its own."""


UNSET = Unset()


class When(NamedTuple):
    """When a job becomes due: at a time, after seconds, or at once (both None)."""

    run_at: datetime | None
    delay_seconds: float | None


AT_ONCE = When(None, None)


def when(delay: timedelta | float | None, run_at: datetime | None) -> When:
    """Check and normalise the two ways to delay a job. Raises `EnqueueError`."""
    if delay is not None and run_at is not None:
        raise EnqueueError("delay= and run_at= exclude each other: give one of them")
    if run_at is not None and not isinstance(run_at, datetime):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise EnqueueError(f"run_at={run_at!r} is no time: give an aware datetime, e.g. datetime.now(UTC) + ...")
    if run_at is not None and run_at.tzinfo is None:
        raise EnqueueError(f"run_at={run_at!r} has no time zone: give an aware datetime, e.g. datetime.now(UTC) + ...")
    if run_at is not None and not _MIN < run_at < _MAX:
        raise EnqueueError(f"run_at={run_at!r} is no time that a job can become due at: give one that comes")
    if delay is None:
        # In UTC: two times of the hour that is repeated in autumn are equal in their own time zone.
        return When(None if run_at is None else run_at.astimezone(UTC), None)
    seconds = delay.total_seconds() if isinstance(delay, timedelta) else delay
    real = isinstance(seconds, int | float)  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be unchecked
    if not real or not 0 <= seconds <= MAX_DELAY_SECONDS:
        raise EnqueueError(f"delay={delay!r}: give seconds between 0 and {MAX_DELAY_SECONDS:.0f}, or use run_at=")
    return When(None, float(seconds) or None)


class Kind(NamedTuple):
    """What jobs have in common that one statement stores; see `kind_of`."""

    schema: str
    type_name: str
    home: str | None
    origin: str
    grouped: bool
    policy: int
    when: When
    priority: int
    has_grown: Callable[[str], bool]

    def arguments(self, groups: str | None, headers: str | None, payloads: str) -> tuple[object, ...]:
        """Those of the ``.sql`` files: of one job, or of several, whose texts are joined."""
        first = (self.type_name, self.home or self.origin, groups, self.priority)
        return (*first, self.when.run_at, self.when.delay_seconds, headers, payloads, self.policy)

    def place(self) -> str:
        """Who finds out the origin, by the name of the statement: the home's, one that looks where the group has jobs,
        or, as "", nobody has to."""
        if self.home is not None:
            return "home_"
        return "placed_" if self.grouped and self.origin and self.has_grown(self.origin.rpartition("/")[0]) else ""


def kind_of(
    schema: str,
    type_name: str,
    home: str | None,
    origin: str | None,
    grouped: bool,
    policy: int,
    when: When,
    priority: int,
    has_grown: Callable[[str], bool],
) -> Kind:
    """Check what jobs have in common; see `JobType.enqueue`. Raises `EnqueueError`.

    home: the type's, which counts where there is no `origin`. grouped: whether the jobs have groups. has_grown: whether
    partitions were added to a topic, so that the group may have jobs in another origin. It is asked when the statement
    is about to run: until then a session's flush may have waited for the entity's row.
    """
    at_home = home is not None and origin is None
    chosen = "" if at_home else _origin(type_name, origin)
    its_home = home if at_home else None
    return Kind(schema, type_name, its_home, chosen, grouped, policy, when, _priority(priority), has_grown)


def homeless(schema: str, type_name: str, home: str | None) -> MissingOrigin:
    """What is raised where a statement has found no row of the type's home."""
    return MissingOrigin(
        f"the job {type_name!r} has its home in {home!r}, whose partitions are not known yet: start a service "
        "that consumes it, or names it in topics=, once while Kafka is up; else, as with a consumer of your own, "
        f"give origin='topic/partition', or insert its row into {schema}.topic"
    )


def one_job(
    kind: Kind,
    group: str | None,
    payload: str,
    headers: Mapping[str, str] | None,
    unique_key: str | None,
    key: Callable[[], bytes | None],
) -> Callable[[], Statement]:
    """What gives the statement that inserts one job; see `JobType.enqueue`. Raises `EnqueueError`.

    key: gives the key whose partitions the origin is one of; None: the group stands for it.
    """
    arguments = kind.arguments(short("group", group), headers_text(headers), payload)
    if unique_key == "":
        raise EnqueueError("unique_key is empty: give what must not be there twice, or None")
    unique, last = ("", ()) if unique_key is None else ("unique_", (short("unique_key", unique_key),))

    def statement() -> Statement:
        place = kind.place()
        if place == "placed_":
            return Statement(f"insert_{unique}placed_job", kind.schema, (*arguments, key(), *last), 1, "")
        return Statement(f"insert_{unique}{place}job", kind.schema, (*arguments, *last), 1, kind.origin)

    return statement


def many_jobs(
    kind: Kind,
    groups: Sequence[str] | None,
    payloads: Sequence[bytes],
    headers: str | Sequence[str | None] | None,
    key: Callable[[], bytes | None],
) -> Callable[[], Statement]:
    """What gives the statement that inserts many jobs of one type, in order; see `JobType.enqueue_many`. Raises
    `EnqueueError`.

    groups: one for each payload, none of them empty; or None for all. payloads: the JSON of each. headers: the text of
    all, or those of each. key: as in `one_job`.
    """
    if isinstance(headers, str) or headers is None:
        text, suffix = headers, ""
    else:
        text, suffix = _SEPARATOR.join(each or "" for each in headers), "_with_headers"
    together = _SEPARATOR.encode().join(payloads).decode()
    arguments = kind.arguments(None if groups is None else _joined(groups), text, together)
    count = len(payloads)

    def statement() -> Statement:
        place = kind.place()
        if place == "placed_":
            return Statement(f"insert_placed_jobs{suffix}", kind.schema, (*arguments, key()), count, "")
        last = () if place else (count,)
        return Statement(f"insert_{place}jobs{suffix}", kind.schema, (*arguments, *last), count, kind.origin)

    return statement


def _origin(type_name: str, origin: str | None) -> str:
    chosen = work_origin() if origin is None else origin
    if not chosen:
        raise MissingOrigin(
            f"the job {type_name!r} needs an origin: outside of a consumer's or a job's handler give "
            "origin=service.origin_for(key, topic), or declare its type with home=topic (or name one "
            "'topic/partition' for all jobs of its group)"
        )
    if not isinstance(chosen, str) or not possible_origin(chosen):  # pyright: ignore[reportUnnecessaryIsInstance]
        short("origin", chosen)
        if origin is not None:  # else it is that of the work, which SQL may have put anywhere
            raise EnqueueError(
                f"origin={chosen!r}: give 'topic/partition', as of service.origin_for(key, 'positions'): nobody can "
                "hold another, so the job would never run"
            )
    if chosen.startswith("outbox/"):
        raise EnqueueError(
            f"origin={chosen!r}: relays lease outbox/0 to outbox/15 as the slots of the outbox, so the job would never "
            "run: give another origin"
        )
    return chosen


@lru_cache(4096)  # each enqueue asks
def possible_origin(origin: str) -> bool:
    """Whether it is a partition's name, ``topic/partition``. Such a one can also be stored."""
    return _ORIGIN.fullmatch(origin) is not None


def short(field: str, text: str | None) -> str | None:
    """`text`, where it can be stored as a name. Raises `EnqueueError`."""
    if text is not None:
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be unchecked
            raise EnqueueError(f"{field}={text!r} is no text: give a str")
        if len(text) * 4 > _MAX_NAME_BYTES and len(text.encode()) > _MAX_NAME_BYTES:
            raise EnqueueError(f"{field} is longer than {_MAX_NAME_BYTES} bytes ({text[:40]!r}...): use a shorter name")
        if "\0" in text or _SEPARATOR in text:
            raise EnqueueError(f"{field}={text!r} holds a control character that cannot be stored: remove it")
        if not _encodable(text):
            raise EnqueueError(f"{field}={text!r} holds half a character (a lone surrogate): correct its decoding")
    return text


def _joined(groups: Sequence[str]) -> str:
    """The groups as one text, checked as one: only what does not pass is looked at one by one, for the error's sake."""
    text = _SEPARATOR.join(groups)
    longest = max(map(len, groups), default=0)
    if (
        longest * 4 > _MAX_NAME_BYTES
        or text.count(_SEPARATOR) != len(groups) - 1
        or "\0" in text
        or not _encodable(text)
    ):
        for group in groups:
            short("group", group)
    return text


def headers_of_each(headers: ManyHeaders | None, count: int) -> str | list[str | None] | None:
    """`headers_text` of all jobs, or of each."""
    if not isinstance(headers, Sequence):
        return headers_text(headers)
    if len(headers) != count:
        raise EnqueueError(
            f"headers= has {len(headers)} for {count} payloads: give one for each, in their order, or a dict for all"
        )
    return [headers_text(each, f"headers[{index}]") for index, each in enumerate(headers)]


def headers_text(headers: Mapping[str, str] | None, field: str = "headers") -> str | None:
    """These and the current ones that travel on, as JSON whose values Postgres can turn into text: else every cycle
    that touches the job would be refused."""
    if headers is not None and not isinstance(headers, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise EnqueueError(f"{field}={headers!r}: give a dict of texts, or of many jobs a list of such")
    headers = {**missing_headers(headers or ()), **(headers or {})}
    if not headers:
        return None
    for name, text in headers.items():
        if not (isinstance(name, str) and isinstance(text, str)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise EnqueueError(f"{field}: {name!r}={text!r}: give texts")
        if "\0" in name + text or not _encodable(name + text):
            raise EnqueueError(f"{field}: {name!r}={text!r} holds NUL or half a character: remove it")
        if name == IDEMPOTENCY_KEY:
            raise EnqueueError(
                f"{field}: {name!r} is what a requeued job has, and receivers would take this one for a repeat of "
                "another one: give your own another name"
            )
    return json.dumps(dict(headers))


def _encodable(text: str) -> bool:
    return text.isascii() or text.encode(errors="replace").decode() == text


def _priority(priority: int) -> int:
    if not isinstance(priority, int) or not -100 <= priority <= 100:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise EnqueueError(f"priority={priority!r}: give a whole number from -100 to 100")
    return priority
