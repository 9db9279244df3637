"""What travels with the work: a correlation id and the W3C trace context, from message to job to outgoing message.

While a handler runs, `current_work` is what it works on. Everything else is derived from that when it is asked for: by
an `enqueue`, by a `publish`, by a line of the log. So a job that does none of these pays for one assignment.
"""

import logging
import re
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, cast

__all__ = [
    "CORRELATION_ID",
    "TRACEPARENT",
    "TRACESTATE",
    "LogContext",
    "Within",
    "Work",
    "correlated",
    "current_headers",
    "current_key",
    "current_work",
    "missing_headers",
    "shared_headers",
    "travelling",
    "work_origin",
]

CORRELATION_ID, TRACEPARENT, TRACESTATE = "correlation_id", "traceparent", "tracestate"

_FIELDS = (
    *("service", "job_id", "job_type", "origin", "group", "attempt"),
    *("topic", "partition", "offset", CORRELATION_ID, "trace_id"),
)
# As Kafka's producers, HTTP headers and Spring spell it.
_SPELLINGS = {"correlation_id", "correlationid", "x_correlation_id", "kafka_correlationid"}
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
_TRAVELLING = (CORRELATION_ID, TRACEPARENT, TRACESTATE)
_MOST_CHARACTERS = 512  # of a value; what is longer is none of ours


class Work(Protocol):
    """What a handler works on: a job, a message, or what `correlated` says."""

    def travelling(self) -> Mapping[str, str]:
        """Those of its headers that travel on: correlation_id, traceparent, tracestate."""
        ...

    def log_fields(self) -> Mapping[str, object]:
        """What a line of the log should say of it."""
        ...


# Set around each handler. Several: of a handler that takes lists; not its own list, which it may use up.
current_work: ContextVar[Work | Sequence[Work] | None] = ContextVar("sidings_work", default=None)


def travelling(headers: Iterable[tuple[str, object]]) -> dict[str, str]:
    """Those of these headers that travel on, as texts. One that is not what it should be is left out: no message must
    fail because of it."""
    out: dict[str, str] = {}
    for name, value in headers:
        if (key := _key(name)) in _TRAVELLING and (text := _text(value)):
            out[key] = text
    if TRACEPARENT not in out or not _TRACEPARENT.fullmatch(out[TRACEPARENT]):
        out.pop(TRACEPARENT, None)
        out.pop(TRACESTATE, None)
    return out


def _key(name: str) -> str:
    key = name.lower().replace("-", "_")
    return CORRELATION_ID if key in _SPELLINGS else key


def _text(value: object) -> str:
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    fits = isinstance(value, str) and len(value) <= _MOST_CHARACTERS and value.isprintable() and "\ufffd" not in value
    return cast(str, value) if fits else ""


def current_headers() -> dict[str, str]:
    """The headers that what is done now hands on, for calls to other services::

        await http.post(url, headers={"x-correlation-id": current_headers().get("correlation_id", "")})

    `enqueue`, `Outbox.publish` and `Producer.send` add them by themselves.

    Returns:
        Those of `correlation_id`, `traceparent` and `tracestate` that the job or message has on which the handler
        works; of several, what they have in common. The current OpenTelemetry span takes the place of their trace.
    """
    work = current_work.get()
    headers = {} if work is None else shared_headers(work)
    # Whoever has a span has imported the module; nobody else should pay for the import.
    if (trace := cast(Any, sys.modules.get("opentelemetry.trace"))) is not None:
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            headers.pop(TRACESTATE, None)
            headers[TRACEPARENT] = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
            if state := span.trace_state.to_header():
                headers[TRACESTATE] = state
    return headers


def missing_headers(given: Iterable[str]) -> dict[str, str]:
    """Of the current headers, those that are to be added where headers of these names are given."""
    headers = current_headers()
    if headers and (keys := {_key(name) for name in given}):
        keys |= {TRACESTATE} if TRACEPARENT in keys else set[str]()
        headers = {name: text for name, text in headers.items() if name not in keys}
    return headers


def shared_headers(work: Work | Sequence[Work]) -> dict[str, str]:
    """The headers that travel on from one piece of work, or that several have in common."""
    if not isinstance(work, Sequence):
        return dict(work.travelling())
    first, *others = [item.travelling().items() for item in work] or [dict[str, str]().items()]
    return {name: text for name, text in first if all((name, text) in other for other in others)}


class Within:
    """Work that is done within other work: a stored message within its job."""

    def __init__(self, outer: Work, inner: Work) -> None:
        self.outer = outer
        self.inner = inner

    def travelling(self) -> Mapping[str, str]:
        """Those of the inner."""
        return self.inner.travelling()

    def log_fields(self) -> Mapping[str, object]:
        """Those of both."""
        return {**self.outer.log_fields(), **self.inner.log_fields()}


def current_key() -> bytes | None:
    """The key of the message that the handler works on; None where it works on no message, or on several."""
    key = getattr(_subject(), "key", None)  # of a consumer's message, which this package does not know
    return key if isinstance(key, bytes) else None


def work_origin() -> str | None:
    """The origin of what the handler works on, which the jobs that it enqueues belong to unless it says otherwise; None
    outside of handlers. Of a stored message it is its job's, which may have been moved from the message's partition.

    A task that the handler has started has it too, also once that has ended: what it enqueues a moment later still
    belongs there, and nothing tells it from a task that goes on for others, which is to get a context of its own."""
    work: object = current_work.get()
    while isinstance(work, Within | _Given):
        work = work.outer if isinstance(work, Within) else work.inner
    if isinstance(work, Sequence):
        work = cast(Any, work)[0]
    return getattr(work, "origin", None)


def _subject() -> object:
    """The job or message, or the list of them, that the handler got."""
    work: object = current_work.get()
    while isinstance(work, Within | _Given):
        work = work.inner
    return work


class _Given:
    """What `correlated` says."""

    def __init__(self, headers: Mapping[str, str], inner: Work | Sequence[Work] | None) -> None:
        self.inner = inner  # what the handler works on
        self._headers = headers

    def travelling(self) -> Mapping[str, str]:
        return self._headers

    def log_fields(self) -> Mapping[str, object]:
        return {} if self.inner is None else _shared_fields(self.inner)


@contextmanager
def correlated(
    correlation_id: str, *, traceparent: str | None = None, tracestate: str | None = None
) -> Generator[None]:
    """Begin a chain, or carry on one that came in another way than by a job or message::

        with correlated(request.headers.get("x-correlation-id") or uuid4().hex):
            await send_eta.enqueue(tx, SendEta(...), origin=service.origin_for(transport_id, "transports"))

    What is enqueued and published inside of the block carries it.

    Args:
        correlation_id: 1 to 512 printable characters.
        traceparent: As W3C's trace context has it. Default: the trace around this block.
        tracestate: Goes with `traceparent`.

    Raises:
        ValueError: A text cannot travel: it is empty, longer than 512 characters, not printable, or no traceparent; or
            there is a tracestate without a traceparent.
    """
    given = {CORRELATION_ID: correlation_id, TRACEPARENT: traceparent, TRACESTATE: tracestate}
    wanted = {name: text for name, text in given.items() if text is not None}
    headers = travelling(wanted.items())
    for name, text in wanted.items():
        if name not in headers:
            form = "that of W3C's trace context" if name == TRACEPARENT else "a text of 1 to 512 printable characters"
            raise ValueError(f"{name}={text!r} cannot travel: give {form}")
    work = current_work.get()
    if work is not None and traceparent is None:
        headers = {**shared_headers(work), **headers}
    token = current_work.set(_Given(headers, work))
    try:
        yield
    finally:
        current_work.reset(token)


class LogContext(logging.Filter):
    """Gives each record of the log the fields of the job or message that is worked on::

        handler = logging.StreamHandler()
        handler.addFilter(LogContext("tracker"))
        handler.setFormatter(logging.Formatter("%(levelname)s %(correlation_id)s %(job_id)s %(message)s"))
        logging.basicConfig(handlers=[handler], level=logging.INFO)

    The fields are `service`, `job_id`, `job_type`, `origin`, `group`, `attempt`, `topic`, `partition`, `offset`,
    `correlation_id` and `trace_id`. What a record brings along stays. Put the filter on a handler of the log, not on a
    logger, so that it sees the records of all loggers.

    Args:
        service: Value of the field `service`.
        missing: Value of a field that there is nothing to say for. None suits formatters that write JSON.
    """

    def __init__(self, service: str = "", *, missing: str | None = "-") -> None:
        super().__init__()
        self._defaults: dict[str, object] = dict.fromkeys(_FIELDS, missing)
        if service:
            self._defaults["service"] = service

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the fields; every record passes."""
        fields = dict(self._defaults)
        work = current_work.get()
        if work is not None:
            fields.update((name, value) for name, value in _shared_fields(work).items() if value is not None)
        headers = current_headers()
        if CORRELATION_ID in headers:
            fields[CORRELATION_ID] = headers[CORRELATION_ID]
        if TRACEPARENT in headers:
            fields["trace_id"] = headers[TRACEPARENT].split("-")[1]
        for name, value in fields.items():
            record.__dict__.setdefault(name, value)
        return True


def _shared_fields(work: Work | Sequence[Work]) -> dict[str, object]:
    if not isinstance(work, Sequence):
        return dict(work.log_fields())
    first, *others = [item.log_fields() for item in work] or [dict[str, object]()]
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}
