"""What travels with the work: correlation id and trace, into jobs, messages and lines of the log."""

import asyncio
import gc
import logging
import re
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import pytest
from sidings import Job, LogContext, Message, Registry, Retry, Transaction, correlated, current_headers
from sidings.jobs.context import current_work, missing_headers, travelling
from sidings.kafka.outbox import OutboxSettings
from sidings.kafka.outbox.message import headers_from_text, outgoing
from tenacity import stop_after_attempt, wait_none

from . import guide
from .consumer_support import a_service, produce_raw
from .support import ORIGIN, Ride, connected, enqueue, eventually, fetch, history, running

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HEADERS = {"correlation_id": "c-1", "traceparent": TRACE, "tracestate": "a=b"}


class Collector(logging.Handler):
    """Keeps the records of the log, with the fields of the context."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.addFilter(LogContext("tracker", **options))

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def fields(self, message: str, *names: str) -> list[Any]:
        [record] = [record for record in self.records if record.getMessage() == message]
        return [getattr(record, name) for name in names]


@contextmanager
def collected(**options: Any) -> Iterator[Collector]:
    collector, logger = Collector(**options), logging.getLogger("rides")
    logger.addHandler(collector)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield collector
    finally:
        logger.removeHandler(collector)
        logger.setLevel(before)


log = logging.getLogger("rides")


# -- which headers travel -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["correlation_id", "correlation-id", "correlationId", "X-Correlation-ID", "kafka_correlationId"]
)
def test_the_usual_spellings_of_a_correlation_id_are_understood(name: str) -> None:
    assert travelling([(name, b"c-1"), ("tenant", b"x")]) == {"correlation_id": "c-1"}


@pytest.mark.parametrize("value", [b"", b"\xff", b"a\x00b", b"x" * 513, None, 7, "a\nb"])
def test_a_header_that_cannot_travel_is_left_out(value: object) -> None:
    assert travelling([("correlation_id", value), ("traceparent", TRACE)]) == {"traceparent": TRACE}


NO_TRACEPARENTS = ["00-0-0-01", "", TRACE + " ", TRACE.upper(), f"00-{'0' * 32}-b7ad6b7169203331-01"]


@pytest.mark.parametrize("value", NO_TRACEPARENTS)
def test_a_traceparent_that_is_none_is_left_out_with_its_tracestate(value: str) -> None:
    assert travelling([("traceparent", value), ("tracestate", b"a=b")]) == {}


def test_what_is_given_explicitly_wins() -> None:
    with correlated("c-1", traceparent=TRACE, tracestate="a=b"):
        assert missing_headers([]) == HEADERS
        assert missing_headers(["Correlation-ID"]) == {"traceparent": TRACE, "tracestate": "a=b"}
        assert missing_headers(["traceparent"]) == {"correlation_id": "c-1"}
    assert missing_headers([]) == current_headers() == {}


def test_a_chain_that_is_begun_within_another_stays_in_its_trace() -> None:
    with correlated("c-1", traceparent=TRACE, tracestate="a=b"):
        with correlated("c-2"):
            assert current_headers() == {**HEADERS, "correlation_id": "c-2"}
        assert current_headers() == HEADERS


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"correlation_id": ""}, "give a text of 1 to 512 printable characters"),
        ({"correlation_id": UUID(int=7)}, "give a text of 1 to 512 printable characters"),  # it has to be .hex, or str
        ({"correlation_id": "c", "traceparent": "x"}, "give that of W3C's trace context"),
    ],
)
def test_what_cannot_travel_begins_no_chain(arguments: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=f"cannot travel: {remedy}"), correlated(**arguments):
        pass


def test_several_hand_on_what_they_have_in_common() -> None:
    one, two = Job.fake(1, headers=HEADERS), Job.fake(2, headers={**HEADERS, "traceparent": TRACE[:-1] + "0"})
    token = current_work.set([one, two])
    assert current_headers() == {"correlation_id": "c-1", "tracestate": "a=b"}
    current_work.reset(token)


def test_a_published_message_carries_the_current_headers() -> None:
    with correlated("c-1", traceparent=TRACE):
        message = outgoing("t", key="k", value=None, headers={"a": b"\xff"}, partition_key=None, timestamp=None,
                           settings=OutboxSettings(correlation_header="Correlation-Id"))  # fmt: skip
    sent = dict(headers_from_text(message.headers))
    assert sent == {"a": b"\xff", "Correlation-Id": b"c-1", "traceparent": TRACE.encode()}


@pytest.mark.parametrize("given", ["x-request-id", "X-Request-Id", "correlation_id"])
def test_a_correlation_id_that_is_given_is_the_only_one_of_its_message_under_any_name(given: str) -> None:
    """The current one came behind it, and of two headers of one name the last counts."""
    with correlated("c-1", traceparent=TRACE):
        message = outgoing("t", key="k", value=None, headers={given: "own"}, partition_key=None, timestamp=None,
                           settings=OutboxSettings(correlation_header="x-request-id"))  # fmt: skip
    assert headers_from_text(message.headers) == [(given, b"own"), ("traceparent", TRACE.encode())]


# -- jobs ---------------------------------------------------------------------------------------------------------


async def test_a_job_hands_its_headers_on_to_the_jobs_that_it_enqueues(database: str) -> None:
    registry = Registry()
    seen: dict[str, dict[str, str]] = {}

    @registry.job(transactional=True)
    async def first(job: Job[Ride]) -> None:
        await second.enqueue(job.tx, job.payload, headers={"own": "x"})
        await third.enqueue_many(job.tx, [job.payload], headers={"correlation_id": "other"})

    @registry.job()
    def second(job: Job[Ride]) -> None:
        seen["second"] = job.headers

    @registry.job()
    async def third(job: Job[Ride]) -> None:
        seen["third"] = job.headers

    await enqueue(database, first, [Ride()], headers={**HEADERS, "stays": "here"})
    async with running(database, registry):
        await eventually(lambda: len(seen) == 2)
    assert seen["second"] == {**HEADERS, "own": "x"}
    assert seen["third"] == {**HEADERS, "correlation_id": "other"}


async def test_a_job_without_headers_hands_on_none_whatever_ran_before_it(database: str) -> None:
    registry = Registry()
    seen: list[dict[str, str]] = []

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        seen.append(current_headers())

    await enqueue(database, ride, [Ride(transport="a")], headers=HEADERS)
    await enqueue(database, ride, [Ride(transport="a")])
    with correlated("of whoever started the executor"):
        async with running(database, registry, concurrency=1):
            await eventually(lambda: len(seen) == 2)
    assert seen == [HEADERS, {}]
    assert await fetch(database, "SELECT count(*) FROM sidings.job WHERE headers IS NOT NULL") == [(0,)]


async def test_a_correlation_id_of_ones_own_hides_neither_origin_nor_job(database: str) -> None:
    registry = Registry()
    origins: list[str] = []

    @registry.job(batch=2)
    async def ride(jobs: list[Job[Ride]]) -> None:
        with correlated("c-2"):
            log.info("inside")
            async with connected(database) as connection, connection.transaction():
                await follow_up.enqueue(connection, Ride())

    @registry.job()
    async def follow_up(job: Job[Ride]) -> None:
        with correlated("c-3"):
            origins.append(job.origin)

    await enqueue(database, ride, [Ride()], headers=HEADERS, origin="t/7")
    with collected() as lines:
        async with running(database, registry, ["t/7"]):
            await eventually(lambda: origins)
    assert origins == ["t/7"]
    assert lines.fields("inside", "job_type", "correlation_id") == ["ride", "c-2"]


async def test_an_idle_worker_keeps_no_payload(database: str) -> None:
    registry = Registry()
    payloads: list[weakref.ref[Ride]] = []

    @registry.job()
    async def ride(job: Job[Ride]) -> None:
        payloads.append(weakref.ref(job.payload))

    await enqueue(database, ride, [Ride()], headers=HEADERS)
    async with running(database, registry):
        await eventually(lambda: payloads and gc.collect() >= 0 and payloads[0]() is None)


async def test_an_enqueue_outside_of_a_handler_carries_what_is_said_around_it(database: str) -> None:
    registry = Registry()

    @registry.job()
    async def ride(job: Job[Ride]) -> None: ...

    async with connected(database) as connection, connection.transaction():
        with correlated("c-1"):
            await ride.enqueue(connection, Ride(), origin=ORIGIN)
        await ride.enqueue(connection, Ride(), origin=ORIGIN)
        rows = await connection.fetch("SELECT headers ->> 'correlation_id' AS id FROM sidings.job ORDER BY job.id")
    assert [row["id"] for row in rows] == ["c-1", None]


# -- the log ------------------------------------------------------------------------------------------------------


async def test_every_line_of_a_handler_tells_its_job(database: str) -> None:
    registry = Registry()

    @registry.job(group="transport")
    async def coroutine(job: Job[Ride]) -> None:
        log.info("in a coroutine")
        await asyncio.create_task(elsewhere())

    async def elsewhere() -> None:
        log.info("in a task of its own")

    @registry.job()
    def plain(job: Job[Ride]) -> None:
        assert threading.current_thread() is not threading.main_thread()
        log.info("in a thread", extra={"group": "of the record"})

    @registry.job(batch=5)
    async def several(jobs: list[Job[Ride]]) -> None:
        log.info("of %s jobs", len(jobs))

    await enqueue(database, coroutine, [Ride(transport="a")], headers=HEADERS)
    await enqueue(database, plain, [Ride()])
    await enqueue(database, several, [Ride()] * 2, headers={"correlation_id": "c-2"})
    with collected() as lines:
        log.info("outside")
        async with running(database, registry):
            await eventually(lambda: len(lines.records) == 5)
    ids = {row["type"]: row["job_id"] for row in await history(database)}
    names = ("service", "job_id", "job_type", "origin", "group", "attempt", "correlation_id", "trace_id")
    expected = ["tracker", ids["coroutine"], "coroutine", ORIGIN, "a", 1, "c-1", "0af7651916cd43dd8448eb211c80319c"]
    assert lines.fields("in a coroutine", *names) == expected
    assert lines.fields("in a task of its own", *names) == expected
    assert lines.fields("in a thread", *names) == [
        "tracker", ids["plain"], "plain", ORIGIN, "of the record", 1, "-", "-"
    ]  # fmt: skip
    assert lines.fields("of 2 jobs", *names) == ["tracker", "-", "several", ORIGIN, "-", 1, "c-2", "-"]
    assert lines.fields("outside", *names) == ["tracker", *["-"] * 7]


async def test_the_lines_about_a_failed_attempt_tell_its_job(database: str) -> None:
    registry = Registry()

    @registry.job(retry=Retry(wait=wait_none()))
    async def ride(job: Job[Ride]) -> None:
        if job.attempt == 1:
            raise ValueError("x")

    await enqueue(database, ride, [Ride()], headers=HEADERS)
    collector = Collector(missing=None)
    logging.getLogger("sidings.executor").addHandler(collector)
    try:
        async with running(database, registry):
            await eventually(lambda: any("failed" in record.getMessage() for record in collector.records))
    finally:
        logging.getLogger("sidings.executor").removeHandler(collector)
    [record] = [record for record in collector.records if "failed" in record.getMessage()]
    assert (record.job_type, record.correlation_id, record.topic) == ("ride", "c-1", None)  # type: ignore[attr-defined]


# -- messages -----------------------------------------------------------------------------------------------------


async def test_the_correlation_id_travels_from_message_to_job_to_message(database: str, sidings_kafka: str, topic: Any):
    """Also where the message was parked on the way."""
    rides, etas = await topic("rides"), await topic("etas")
    service = a_service(database, sidings_kafka)
    arrived: list[dict[str, str]] = []
    tries: Counter[int] = Counter()

    @service.consumer(rides, retry=Retry(stop=stop_after_attempt(1)))
    async def on_ride(message: Message[Ride], tx: Transaction) -> None:
        number = message.value.number
        tries[number] += 1
        log.info("ride %s, try %s", number, tries[number])
        if number == 2 and tries[number] <= 2:  # with its batch, and alone
            raise ValueError("parked")
        await follow_up.enqueue(tx, message.value)

    @service.job(transactional=True)
    async def follow_up(job: Job[Ride]) -> None:
        await service.outbox.publish(job.tx, etas, key="k", value=job.payload)

    @service.consumer(etas)
    async def on_eta(message: Message[Ride], tx: Transaction) -> None:
        arrived.append(message.travelling())

    with collected() as lines:
        async with service:
            for number in (1, 2):
                headers = [("Correlation-Id", f"c-{number}".encode()), ("traceparent", TRACE.encode())]
                value = Ride(number=number).model_dump_json().encode()
                await produce_raw(sidings_kafka, rides, value, key=b"k", headers=headers)
                await eventually(lambda: len(arrived) == number)  # noqa: B023
    assert arrived == [{"correlation_id": f"c-{number}", "traceparent": TRACE} for number in (1, 2)]
    names = ("topic", "partition", "offset", "origin", "correlation_id", "job_type")
    assert lines.fields("ride 1, try 1", *names) == [rides, 0, 0, f"{rides}/0", "c-1", "-"]
    assert lines.fields("ride 2, try 1", *names) == [rides, 0, 1, f"{rides}/0", "c-2", "-"]
    assert lines.fields("ride 2, try 3", *names) == [rides, 0, 1, f"{rides}/0", "c-2", f"message:{rides}"]
    rows = await fetch(database, "SELECT DISTINCT type, correlation_id FROM sidings.job_history ORDER BY 1, 2")
    assert [tuple(row) for row in rows] == [
        ("follow_up", "c-1"), ("follow_up", "c-2"), (f"message:{rides}", "c-2")
    ]  # fmt: skip


async def test_what_takes_a_list_of_messages_hands_on_what_they_have_in_common(
    database: str, sidings_kafka: str, topic: Any
):
    name = await topic()
    service = a_service(database, sidings_kafka)
    found: list[dict[str, str]] = []

    @service.consumer(name, batch=2)
    async def on_rides(messages: list[Message[Ride]], tx: Transaction) -> None:
        found.append(current_headers())

    value = Ride().model_dump_json().encode()
    for number in (1, 2):
        headers = [("correlation-id", f"c-{number}".encode()), ("traceparent", TRACE.encode())]
        await produce_raw(sidings_kafka, name, value, headers=headers)
    async with service:
        await eventually(lambda: found)
    assert found == [{"traceparent": TRACE}]


# -- the documentation --------------------------------------------------------------------------------------------


async def test_the_documentations_example_works(database: str) -> None:
    names = guide.run("observability.md", "What travels")
    async with connected(database) as connection, connection.transaction():
        await connection.execute("INSERT INTO sidings.topic (topic, partitions) VALUES ('invoices', 3)")
        await names["post_invoice"](connection, 1, "c-1")
        await names["post_invoice"](connection, 2, None)
        rows = await connection.fetch("SELECT headers ->> 'correlation_id' AS id FROM sidings.job ORDER BY job.id")
    assert rows[0]["id"] == "c-1"
    assert len(rows[1]["id"]) == 32


async def test_headers_that_are_given_in_sql_arrive_as_the_guide_says(database: str) -> None:
    """jsonb was all that it named, and publish takes json: "function sidings.publish(...) does not exist"."""
    text = (guide.DOCS / "observability.md").read_text()
    [line] = re.findall(r"^- \*\*SQL:\*\* (.+\n(?:  .+\n)*)", text, re.MULTILINE)
    enqueue, publish = re.findall(r"`headers => (\w+)\('correlation_id', …\)`", line)
    async with connected(database) as connection:
        await connection.execute(
            f"""SELECT sidings.enqueue('ride', '{{}}', 't/0', headers => {enqueue}('correlation_id', 'c-1'));
                SELECT sidings.publish('etas', 'k', '{{}}', headers => {publish}('correlation_id', 'c-1'));
                SELECT sidings.publish_bytes('etas', 'k', 'v', headers => {publish}('correlation_id', 'c-1'))"""
        )
    of = "headers ->> 'correlation_id' AS id"
    told = await fetch(database, f"SELECT {of} FROM sidings.job UNION ALL SELECT {of} FROM sidings.outbox")
    assert [row["id"] for row in told] == ["c-1"] * 3


def test_the_documentations_log_format_works(capsys: pytest.CaptureFixture[str]) -> None:
    handler = guide.run("observability.md", "In every line of the log")["set_up_logs"]()
    try:
        record = logging.makeLogRecord({"msg": "hello", "levelname": "INFO"})
        token = current_work.set(Job.fake(1, id=7, type="send_eta", headers={"correlation_id": "c-1"}))
        assert handler.filter(record)
        current_work.reset(token)
        assert handler.format(record) == "INFO c-1 send_eta 7 hello"
    finally:
        logging.getLogger().removeHandler(handler)


def test_the_documentations_filter_keeps_one_of_many_lines_of_aiokafka() -> None:
    seldom = guide.run("observability.md", "While Kafka is away")["Seldom"]()
    places = [
        ("aiokafka", 7),
        ("aiokafka", 7),
        ("aiokafka.consumer.fetcher", 9),
        ("sidings.outbox", 7),
        ("sidings.outbox", 7),
    ]
    records = [logging.makeLogRecord({"name": name, "pathname": "client.py", "lineno": line}) for name, line in places]
    assert [seldom.filter(record) for record in records] == [True, False, True, True, True]
