"""How the parts of a service fail together, and what it tells of them meanwhile."""

import asyncio
import gc
import re
import time
from collections import Counter
from typing import Any
from weakref import ref

import httpx
import psutil
import pytest
from aiokafka import AIOKafkaConsumer
from prometheus_client import CollectorRegistry
from sidings import ConfigurationError, Job, Message, OutboxSettings, Service, StaticAssignment, Transaction, migrate
from sidings.devstack.topics import create_topic
from sidings.executor import Executor
from sidings.executor.clock import now
from sidings.kafka import Directory, KafkaSettings, Relay

from .consumer_support import TWICE_AND_PARK, Number, a_service, numbers, produce, record, sample
from .directory_support import COMPACTED
from .guide import DOCS
from .support import ORIGIN, SECONDS, Ride, enqueue, eventually, value


async def test_a_relay_that_ends_brings_the_service_down(database, sidings_kafka, monkeypatch):
    gate = asyncio.Event()

    async def ends(_: Relay) -> None:
        await gate.wait()
        raise RuntimeError("a bug of the relay's")

    monkeypatch.setattr(Relay, "wait", ends)
    running = asyncio.create_task(a_service(database, sidings_kafka).run())
    gate.set()
    with pytest.raises(RuntimeError, match="a bug of the relay's"):
        await asyncio.wait_for(running, SECONDS)


async def test_a_service_without_consumers_stops_while_its_jobs_wait_for_a_directory(database, sidings_kafka):
    """Its executor, which had not started, waited for a lock that the end of the service had taken and kept."""
    service = a_service(database, sidings_kafka)
    service.directory("no-such-topic", model=Number, key=lambda row: row.key)

    async def run() -> None:
        async with service:
            pass

    await asyncio.wait_for(run(), SECONDS)


async def test_a_service_that_has_ended_leaves_no_connection_behind(effects, topic, sidings_kafka):
    """As in a process that lives on: a notebook's, or that of a web server which starts another one."""
    names = [await topic() for _ in range(4)]
    port = int(sidings_kafka.rpartition(":")[2])

    def to_kafka() -> set[Any]:
        return {c.laddr for c in psutil.Process().net_connections() if c.raddr and c.raddr.port == port}

    before = to_kafka()
    for name in names[:2]:
        await produce(sidings_kafka, name, [0])
    service = a_service(effects, sidings_kafka)

    @service.consumer(names[0])
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await record(message, tx)

    @service.consumer(names[1], stateless=True, dead_letter=names[2], retry=TWICE_AND_PARK)
    async def refuse(message: Message[Number]) -> None:
        await service.producer.send(names[3], key="k", value=message.value)
        raise ValueError("no")

    async with service:
        await eventually(lambda: numbers(effects))
        async with service.transaction() as tx:
            receipt = await service.outbox.publish(tx, names[3], key="k", value=Number(n=1))
        await asyncio.wait_for(service.outbox.published(receipt), SECONDS)
        await eventually(lambda: sample(service, "sidings_consumer_messages_total", result="dead_letter") == 1)
    count = "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    await eventually(lambda: value(effects, count))
    await eventually(lambda: to_kafka() <= before)


async def test_health_tells_of_each_part(database, topic, sidings_kafka, monkeypatch):
    service = a_service(database, sidings_kafka)
    service.directory(await topic("terminals"), model=Number, key=lambda row: row.key)
    monkeypatch.setattr(Relay, "problems", lambda _: ["the relay is slow"])
    monkeypatch.setattr(Directory, "problems", lambda _: ["the directory is old"])
    assert "the service does not run" in service.problems()
    async with service:
        await eventually(lambda: not any("not loaded" in told for told in service._life.not_ready()))
        assert {"the relay is slow", "the directory is old"} <= set(service.problems())
        assert "the service does not run" not in service.problems()
    assert "the service does not run" in service.problems()


async def test_health_tells_of_a_failure_where_the_task_that_has_started_the_service_has_ended(
    database, topic, sidings_kafka
):
    """So a fixture starts it, or `run_coroutine_threadsafe`: it ran on without any job, and `/health` was good."""
    service = a_service(database)
    await asyncio.create_task(service.__aenter__())
    consumer = AIOKafkaConsumer(bootstrap_servers=sidings_kafka, group_id="test", enable_auto_commit=True)
    try:
        consumer.subscribe([await topic()], listener=service.executor.rebalance_listener)
        await consumer.start()
        found = await eventually(service.problems)
    finally:
        await consumer.stop()
        with pytest.raises(ConfigurationError, match="make it with enable_auto_commit=False"):
            await service.__aexit__(None, None, None)
    assert "the service has failed and has to be ended: the consumer commits offsets by itself" in "".join(found)


async def test_health_bears_with_an_executor_and_a_relay_that_poll_seldom(database, topic, sidings_kafka):
    """An idle one was unwell from the end of a lease until its next poll: a liveness probe would have ended it."""
    outbox = OutboxSettings(poll_seconds=60.0, lease_seconds=3.0)
    service = a_service(database, sidings_kafka, executor={"poll_seconds": 60.0}, outbox=outbox)
    service.consumer(await topic(), model=Number)(record)
    async with service:
        await eventually(lambda: service._life.not_ready() == [], service._life.not_ready)
        readers = service.executor.reader, service._parts.database.relay.reader
        for reader in readers:
            reader.last_answer = now() - 70.0
        assert service.problems() == []
        for reader in readers:
            reader.last_answer = now() - 80.0
        assert [told[:22] for told in service.problems()] == ["the last read was answ", "the outbox was last re"]


async def test_a_consumer_without_kafka_shows_in_the_metrics(database, monkeypatch):
    """No rule told of it: its lag was not there, and all else was 0."""
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 0.2)
    monkeypatch.setattr("sidings.kafka.outbox.relay._UNREACHABLE_SECONDS", 1e9)
    service = a_service(database, "127.0.0.1:1")
    service.consumer("positions", model=Number)(record)
    async with service:
        await eventually(lambda: sample(service, "sidings_problems") == len(service.problems()) == 1, service.problems)
    assert service.samples.get_sample_value("sidings_problems", {"service": "test"}) is None, "it is taken back"


async def test_all_that_the_rules_ask_for_is_shown_whatever_the_registry(database, topic, sidings_kafka):
    """What prometheus-client tells of the process stands in its default registry alone. With `prometheus=None`, or a
    registry of one's own, no alert came where a service ended again and again; others came after each gap."""
    expressions = re.findall(r"expr: (.*?)\n +(?:for|labels):", (DOCS / "alerts.yml").read_text(), re.DOTALL)
    asked = {name for expression in expressions for name in re.findall(r"\b[a-z]+_\w+\b(?=[{[) ]|$)", expression)}
    service = Service("test", postgres=database, kafka=sidings_kafka, prometheus=None, http="127.0.0.1:0")
    service.consumer(await topic(), model=Number)(record)
    service.directory(await topic(config=COMPACTED), model=Number, key=lambda row: row.key)
    began = time.time()
    async with service:
        host, port = service.http_address or ("", 0)
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://{host}:{port}/metrics")).text
    assert len(asked) > 15
    assert asked <= set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    [started] = re.findall(r'^sidings_start_time_seconds\{service="test"\} (\S+)$', text, re.MULTILINE)
    assert began <= float(started) <= time.time()


async def test_of_two_services_in_a_process_each_metric_is_shown_once(database, sidings_kafka):
    """With their own labels. What reads the text strictly refused all of it: "second HELP line"."""
    registry = CollectorRegistry()
    await migrate(database, service="other", schema="other")

    def service(name: str, schema: str) -> Service:
        made = Service(name, postgres=database, schema=schema, kafka=sidings_kafka, prometheus=registry)
        made.consumer("positions", model=Number)(record)
        return made

    async with service("test", "sidings"), service("other", "other"):
        names = Counter(metric.name for metric in registry.collect())
        assert {"sidings_jobs", "sidings_consumer_messages", "sidings_outbox_slots", "sidings_problems"} <= set(names)
        assert set(names.values()) == {1}
        for name in ("test", "other"):
            assert registry.get_sample_value("sidings_running", {"service": name}) == 0.0
    assert list(registry.collect()) == []


async def test_what_clears_a_registry_keeps_no_later_service_from_showing_its_metrics(database, sidings_kafka):
    """As tests do between each other. Of all later services in the process nothing was shown."""
    registry = CollectorRegistry()
    for _ in range(3):
        service = Service("test", postgres=database, kafka=sidings_kafka, prometheus=registry)
        service.consumer("positions", model=Number)(record)
        async with service:
            shown = {metric.name for metric in registry.collect()}
            assert {"sidings_jobs", "sidings_consumer_messages", "sidings_outbox_slots", "sidings_problems"} <= shown
            for collector in list(registry._collector_to_names):
                registry.unregister(collector)
        assert list(registry.collect()) == []


def test_a_service_that_never_starts_goes_with_its_registry(database):
    """As tests have one for each, and drain its jobs. All of them stayed in memory."""
    service = Service("test", postgres=database, prometheus=CollectorRegistry())
    registry, executor = ref(service._prometheus), ref(service.executor)
    del service
    gc.collect()
    assert (registry(), executor()) == (None, None)


async def test_a_service_whose_relay_has_no_kafka_is_ready_and_says_so(database, sidings_kafka, monkeypatch):
    """Of one without consumers and directories nothing told that its messages waited. It goes on publishing them."""
    monkeypatch.setattr("sidings.kafka.outbox.relay._UNREACHABLE_SECONDS", 0.2)
    service = a_service(database, "127.0.0.1:1")
    told = "the relay cannot send to Kafka: no broker answers"
    async with service:
        await eventually(lambda: any(told in problem for problem in service.problems()))
        await eventually(lambda: service._life.not_ready() == [], service._life.not_ready)
        service._parts.database.relay._senders._kafka = KafkaSettings(bootstrap=sidings_kafka)
        await eventually(lambda: service.problems() == [], service.problems)


async def test_a_stop_in_a_hurry_waits_for_no_batch_and_nothing_is_ready_meanwhile(
    effects, topic, sidings_kafka, monkeypatch
):
    monkeypatch.setattr("sidings.service.life._DRAIN_SECONDS", 20.0)
    name, begun = await topic(), asyncio.Event()
    service = a_service(effects, sidings_kafka, executor={"shutdown_seconds": 20.0})

    @service.consumer(name)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await record(message, tx)
        begun.set()
        await asyncio.Event().wait()

    await produce(sidings_kafka, name, [0])

    async def hurry() -> None:
        await eventually(lambda: "the service is stopping" in service._life.not_ready())
        service._life.hurry()

    async with service:
        await asyncio.wait_for(begun.wait(), SECONDS)
        hurrying = asyncio.create_task(hurry())
        started = time.monotonic()
    await hurrying
    assert time.monotonic() - started < 15, "it has waited for the batch"
    assert await numbers(effects) == []


@pytest.mark.long
async def test_a_kafka_that_hangs_gives_handlers_no_more_time_at_a_stop(database, own_kafka):
    """Theirs began when the group had been left, for which Kafka had ten seconds: so they ran for longer than an
    orchestrator waits before it kills, and nothing of them was recorded, nor any origin given back."""
    kafka = await asyncio.to_thread(own_kafka)
    await create_topic(kafka.bootstrap, "transports", partitions=1)
    service = a_service(database, kafka.bootstrap, executor={"shutdown_seconds": 0.5, "lease_seconds": 60.0})
    service.consumer("transports", model=Number)(record)
    began, consuming = asyncio.Event(), list[bool]()

    @service.job()
    async def ride(job: Job[Ride]) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            consuming.append(any(task.get_name() == "sidings: the consumer" for task in asyncio.all_tasks()))

    async with service:
        await eventually(lambda: "transports/0" in service.executor.held)
        await enqueue(database, ride, [Ride()])
        await asyncio.wait_for(began.wait(), SECONDS)
        await asyncio.to_thread(kafka.pause)
    assert consuming == [True]
    assert await value(database, "SELECT count(*) FROM sidings.origin WHERE owner IS NOT NULL") == 0


async def test_a_start_that_fails_half_way_says_why_and_nothing_else(database, sidings_kafka, caplog, monkeypatch):
    async def fails(_: Relay) -> None:
        raise ZeroDivisionError from cause

    cause = KeyError("why")
    monkeypatch.setattr(Executor, "start", fails)
    with pytest.raises(ZeroDivisionError) as raised:
        async with a_service(database, sidings_kafka):
            pass
    assert raised.value.__cause__ is cause
    assert "has ended unexpectedly" not in caplog.text


@pytest.mark.timeout(60)
async def test_a_service_that_is_cancelled_again_while_it_stops_ends(database):
    """An error had become its own context: an exit stack, of `run` or around the service, went through these for ever,
    and the event loop stood still, deaf to signals."""
    service, begun = a_service(database, assignment=StaticAssignment([ORIGIN])), asyncio.Event()

    @service.job()
    async def ride(job: Job[Ride]) -> None:
        begun.set()
        await asyncio.Event().wait()

    await enqueue(database, ride, [Ride()])
    running = asyncio.create_task(service.run())
    await asyncio.wait_for(begun.wait(), SECONDS)
    running.cancel()
    await eventually(lambda: "the service is stopping" in service._life.not_ready())
    running.cancel()
    await asyncio.wait([running], timeout=SECONDS)
    assert running.cancelled()


@pytest.mark.parametrize("relay", [None, False, True])
async def test_an_instance_without_origins_tells_of_an_outage_of_postgres(
    own_postgres, sidings_kafka, monkeypatch, relay: bool | None
):
    """None of its loops asks Postgres for what it holds, so each took it for well. relay: None without Kafka."""
    monkeypatch.setattr("sidings.kafka.topics._LOAD_SECONDS", 0.1)
    monkeypatch.setattr("sidings.kafka.topics._UNREAD_SECONDS", 1.0)
    postgres = await asyncio.to_thread(own_postgres)
    await migrate(postgres.dsn, service="test")
    outbox = OutboxSettings(relay=bool(relay), lease_seconds=3.0)
    service = a_service(postgres.dsn, None if relay is None else sidings_kafka, outbox=outbox)
    told = "the table of topics cannot be read, for "
    async with service:
        await eventually(lambda: service.problems() == service._life.not_ready() == [], service.problems)
        await asyncio.to_thread(postgres.stop)
        await eventually(lambda: any(told in problem for problem in service.problems()), service.problems)
        [problem] = service._life.not_ready()
        assert problem.startswith(told)
        assert "Connect" in problem
        await asyncio.to_thread(postgres.start)
        await eventually(lambda: service.problems() == service._life.not_ready() == [], service.problems)


async def test_an_instance_that_has_never_reached_postgres_tells_so_once(own_postgres, monkeypatch):
    monkeypatch.setattr("sidings.kafka.topics._LOAD_SECONDS", 0.02)
    monkeypatch.setattr("sidings.kafka.topics._UNREAD_SECONDS", 0.0)
    postgres = await asyncio.to_thread(own_postgres)
    await asyncio.to_thread(postgres.stop)
    async with a_service(postgres.dsn) as service:
        topics = service._life._parts.database.topics
        await eventually(lambda: topics.outage.seconds() > 0)
        [problem] = service.problems()
        assert problem.startswith("the executor has not reached Postgres yet")
