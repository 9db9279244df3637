"""Spans around handlers, through OpenTelemetry's API, where that is installed and set up."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from .context import TRACEPARENT, current_work, shared_headers
from .middleware import Call, Middleware, Next
from .outcome import ErrorInfo
from .retry import Discard, Snooze, that_counts

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, Tracer

__all__ = ["tracing"]


def tracing() -> Middleware | None:
    """A middleware that runs each handler in a span ``process <topic or job type>``, whose parent is the traceparent
    that the message or job carries; several are linked instead. None where there is no tracer provider: nobody has
    imported OpenTelemetry, or set one.
    """
    trace = cast(Any, sys.modules.get("opentelemetry.trace"))
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    return _Spans(trace.get_tracer("sidings"))


class _Spans:
    def __init__(self, tracer: "Tracer") -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, call: Call, call_next: Next) -> object:
        from opentelemetry.trace import SpanKind

        parent, links = self._origin()
        with self._tracer.start_as_current_span(
            f"process {call.name}",
            context=parent,
            kind=SpanKind.CONSUMER,
            links=links,
            attributes=_attributes(call),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                return await call_next()
            except BaseException as error:
                _tell(span, error)
                raise

    def _origin(self) -> "tuple[Context, list[Link]]":
        """The parent of the span, and what it is linked to. An empty context, not None: what was current when the
        executor was started is no parent."""
        from opentelemetry.context import Context
        from opentelemetry.trace import Link, get_current_span

        work = current_work.get()
        items = work if isinstance(work, Sequence) else [] if work is None else [work]
        carriers: list[Mapping[str, str]] = [item.travelling() for item in items]
        if len({carrier.get(TRACEPARENT) for carrier in carriers}) == 1:
            return self._propagator.extract(shared_headers(list(items)), Context()), []
        contexts = [self._propagator.extract(carrier, Context()) for carrier in carriers]
        spans = [get_current_span(context).get_span_context() for context in contexts]
        return Context(), [Link(span) for span in spans if span.is_valid]


def _tell(span: "Span", error: BaseException) -> None:
    """Raises nothing, whatever the class of `error` does when it is asked for its text: what a handler has raised is
    what counts."""
    from opentelemetry.trace import Status, StatusCode

    if isinstance(counts := that_counts(error), Discard | Snooze):
        span.set_attribute("sidings.outcome", "discarded" if isinstance(counts, Discard) else "snoozed")
        return
    info = ErrorInfo.of(error)
    span.set_status(Status(StatusCode.ERROR, f"{info.error_class}: {info.message}"))
    try:
        span.record_exception(error, {"exception.message": info.message})
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - the span has its text
        pass


def _attributes(call: Call) -> dict[str, str | int]:
    """By OpenTelemetry's conventions for messaging, as far as they go."""
    attributes: dict[str, str | int] = {
        "messaging.system": "kafka" if call.messages else "sidings",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": call.name,
        "sidings.origin": call.origin,
    }
    if len(call.jobs) > 1 or len(call.messages) > 1:
        attributes["messaging.batch.message_count"] = len(call.jobs) + len(call.messages)
    elif call.jobs:
        [job] = call.jobs
        attributes |= {"messaging.message.id": str(job.id), "sidings.attempt": job.attempt}
        if job.group is not None:
            attributes["sidings.group"] = job.group
    elif call.messages:
        [message] = call.messages
        attributes["messaging.destination.partition.id"] = str(message.partition)
        attributes["messaging.kafka.offset"] = message.offset
    return attributes
