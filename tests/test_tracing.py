"""Spans around handlers, as OpenTelemetry's SDK records them."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from sidings import (
    Discard,
    Job,
    LogContext,
    Message,
    Registry,
    Retry,
    Snooze,
    StaticAssignment,
    Transaction,
    correlated,
)
from sidings.jobs.context import current_headers
from sidings.jobs.tracing import tracing
from tenacity import retry_if_exception_type, stop_after_attempt, wait_none

from .consumer_support import a_service, produce_raw
from .support import ORIGIN, Ride, drained, enqueue, eventually, outcomes, running

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
VALUE = Ride(transport="a", number=1).model_dump_json().encode()


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The spans of one test; the process has a tracer provider for as long."""
    exporter = InMemorySpanExporter()
    its_provider = TracerProvider()
    its_provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", its_provider)
    yield exporter
    its_provider.shutdown()


async def ended(spans: InMemorySpanExporter, count: int) -> list[ReadableSpan]:
    """The spans in the order in which they began, once so many have ended."""
    await eventually(lambda: len(spans.get_finished_spans()) >= count)
    found = sorted(spans.get_finished_spans(), key=lambda span: span.start_time or 0)
    assert len(found) == count
    return found


def parent_of(span: ReadableSpan) -> tuple[str, str] | None:
    return None if span.parent is None else (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}")


def ids_of(span: ReadableSpan) -> tuple[str, str]:
    context = span.get_span_context()
    assert context is not None
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def traceparent_of(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def traced() -> Registry:
    registry = Registry()
    middleware = tracing()
    assert middleware is not None
    registry.middleware.append(middleware)
    return registry


async def test_one_trace_shows_message_job_and_published_message(
    database: str, sidings_kafka: str, topic: Any, spans: InMemorySpanExporter
) -> None:
    rides, etas = await topic("rides"), await topic("etas")
    service = a_service(database, sidings_kafka)
    arrived: list[dict[str, str]] = []

    @service.consumer(rides)
    async def on_ride(message: Message[Ride], tx: Transaction) -> None:
        await follow_up.enqueue(tx, message.value)

    @service.job(group="transport", transactional=True)
    async def follow_up(job: Job[Ride]) -> None:
        await service.outbox.publish(job.tx, etas, key="k", value=job.payload)

    @service.consumer(etas)
    async def on_eta(message: Message[Ride], tx: Transaction) -> None:
        arrived.append(message.travelling())

    headers = [("traceparent", TRACEPARENT.encode()), ("tracestate", b"vendor=1")]
    await produce_raw(sidings_kafka, rides, VALUE, key=b"k", headers=headers)
    async with service:
        message, job, eta = await ended(spans, 3)
    assert [span.name for span in (message, job, eta)] == [f"process {rides}", "process follow_up", f"process {etas}"]
    assert all(span.kind is SpanKind.CONSUMER and span.status.is_ok is not False for span in (message, job, eta))
    assert parent_of(message) == (TRACE_ID, SPAN_ID)
    assert parent_of(job) == ids_of(message)
    assert parent_of(eta) == ids_of(job)
    assert arrived == [{"traceparent": traceparent_of(job), "tracestate": "vendor=1"}]
    assert message.attributes is not None
    assert job.attributes is not None
    assert dict(message.attributes) == {
        "messaging.system": "kafka",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": rides,
        "messaging.destination.partition.id": "0",
        "messaging.kafka.offset": 0,
        "sidings.origin": f"{rides}/0",
    }
    assert job.attributes["sidings.group"] == "a"
    assert job.attributes["sidings.attempt"] == 1


async def test_every_attempt_is_a_span_and_only_failures_are_errors(database: str, spans: InMemorySpanExporter) -> None:
    registry = traced()
    ends = [ValueError("no answer"), Snooze(0.01), ExceptionGroup("of a task group", [Snooze(0.01)]), Discard("no")]

    @registry.job(retry=Retry(wait=wait_none()))
    async def ride(job: Job[Ride]) -> None:
        raise ends[job.attempt - 1]

    await enqueue(database, ride, [Ride()], headers={"traceparent": TRACEPARENT})
    async with running(database, registry):
        found = await ended(spans, 4)
    assert [span.status.status_code for span in found] == [StatusCode.ERROR, *[StatusCode.UNSET] * 3]
    assert found[0].status.description == "ValueError: no answer"
    assert [event.name for event in found[0].events] == ["exception"]
    assert [span.attributes and span.attributes.get("sidings.outcome") for span in found] == [
        None, "snoozed", "snoozed", "discarded"
    ]  # fmt: skip
    assert {parent_of(span) for span in found} == {(TRACE_ID, SPAN_ID)}


class Broken(Exception):
    """Its `__init__` does not set what its text needs."""

    def __str__(self) -> str:
        return self.text  # type: ignore[attr-defined]


async def test_an_error_whose_text_is_broken_is_what_its_policy_is_asked_about(
    database: str, spans: InMemorySpanExporter
) -> None:
    """The policy was asked about the AttributeError that its text raised in the span, and gave the job up."""
    registry = traced()

    @registry.job(retry=Retry(wait=wait_none(), retry=retry_if_exception_type(Broken)))
    async def ride(job: Job[Ride]) -> None:
        if job.attempt == 1:
            raise Broken

    await enqueue(database, ride, [Ride()])
    async with running(database, registry):
        failed, _ = await ended(spans, 2)
        await drained(database)
    assert await outcomes(database) == ["retried", "succeeded"]
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description == f"{__name__}.Broken: its text cannot be shown: AttributeError"


async def test_jobs_of_several_traces_in_one_call_are_linked(database: str, spans: InMemorySpanExporter) -> None:
    registry = traced()
    handed_on: list[dict[str, str]] = []

    @registry.job(batch=10, retry=Retry(wait=wait_none(), stop=stop_after_attempt(1)))
    async def ride(jobs: list[Job[Ride]]) -> None:
        handed_on.append(current_headers())

    other = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    await enqueue(database, ride, [Ride()], headers={"traceparent": TRACEPARENT})
    await enqueue(database, ride, [Ride()], headers={"traceparent": other})
    await enqueue(database, ride, [Ride()])
    async with running(database, registry):
        [span] = await ended(spans, 1)
    assert span.parent is None
    assert [f"{link.context.trace_id:032x}" for link in span.links] == [TRACE_ID, "1" * 32]
    assert span.attributes is not None
    assert span.attributes["messaging.batch.message_count"] == 3
    assert handed_on == [{"traceparent": traceparent_of(span)}]


async def test_a_job_enqueued_within_a_span_belongs_to_its_trace(database: str, spans: InMemorySpanExporter) -> None:
    """As in an instrumented HTTP framework; the correlation id goes along."""
    service = a_service(database, assignment=StaticAssignment([ORIGIN]))
    ids: list[str | None] = []

    @service.job()
    async def ride(job: Job[Ride]) -> None:
        ids.append(job.headers.get("correlation_id"))

    async with service:
        with trace.get_tracer("http").start_as_current_span("POST /rides"), correlated("c-1"):
            async with service.transaction() as tx:
                await ride.enqueue(tx, Ride(), origin=ORIGIN)
        request, job = await ended(spans, 2)
    assert parent_of(job) == ids_of(request)
    assert ids == ["c-1"]


async def test_what_was_current_when_the_executor_started_is_no_parent(
    database: str, spans: InMemorySpanExporter
) -> None:
    registry = traced()

    @registry.job()
    async def ride(job: Job[Ride]) -> None: ...

    await enqueue(database, ride, [Ride()])
    with trace.get_tracer("main").start_as_current_span("start"):
        async with running(database, registry):
            await eventually(lambda: len(spans.get_finished_spans()) == 1)
    [job] = [span for span in spans.get_finished_spans() if span.name != "start"]
    assert parent_of(job) is None


def test_the_log_tells_the_current_spans_trace(spans: InMemorySpanExporter) -> None:
    record = logging.makeLogRecord({})
    with correlated("c-1", traceparent=TRACEPARENT), trace.get_tracer("t").start_as_current_span("own") as span:
        LogContext().filter(record)
        assert record.trace_id == f"{span.get_span_context().trace_id:032x}"  # type: ignore[attr-defined]


async def test_without_a_tracer_provider_there_is_no_middleware(database: str) -> None:
    assert tracing() is None
    service = a_service(database, assignment=StaticAssignment([ORIGIN]))
    async with service:
        assert service.registry.middleware == []
