"""Directories in a service: everything waits for them, nothing of it needs Postgres."""

import asyncio
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from sidings import (
    Changed,
    ConfigurationError,
    Directory,
    DirectoryNotReady,
    ExecutorSettings,
    Job,
    Message,
    Service,
    SQLite,
    StaticAssignment,
    StorageError,
    migrate,
)
from sidings.devstack.topics import create_topic
from sidings.kafka import Consumer, KafkaExecutor
from sidings.kafka.directory import Memory
from sidings.kafka.directory.storage import Kept, Plan

from .directory_support import COMPACTED, Acquirer, put, quick, row
from .support import SECONDS, Ride, enqueue, eventually


class Payment(BaseModel):
    terminal: str


def a_service(kafka: str | None, **options: Any) -> Any:
    return Service("test", kafka=None if kafka is None else quick(kafka), prometheus=CollectorRegistry(), **options)


async def status(service: Any, page: str) -> int:
    host, port = service.http_address

    def get() -> int:
        try:
            with urllib.request.urlopen(f"http://{host}:{port}{page}", timeout=SECONDS) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    return await asyncio.to_thread(get)


async def pay(kafka: str, name: str, terminal: str) -> None:
    await put(kafka, name, {terminal: Payment(terminal=terminal).model_dump_json().encode()})


async def test_a_service_of_directories_and_stateless_consumers_needs_no_postgres(own_postgres, topic, sidings_kafka):
    """Postgres is gone from before the start; messages are handled all the same, and the directory is current."""
    postgres = own_postgres()
    await migrate(postgres.dsn, service="test")
    await asyncio.to_thread(postgres.kill)
    payments, directory = await topic("payments"), await topic("terminals", config=COMPACTED)
    await pay(sidings_kafka, payments, "T-1")
    await put(sidings_kafka, directory, {"T-1": row("T-1", "a")})
    service = a_service(sidings_kafka, postgres=postgres.dsn)
    terminals = service.directory(directory, model=Acquirer)
    routed: list[str] = []

    @service.consumer(payments, stateless=True, dead_letter=f"{payments}.dlq")
    async def route(message: Message[Payment]) -> None:
        routed.append(terminals[message.value.terminal].acquirer_id)

    async with service:
        await eventually(lambda: routed == ["a"])
        await put(sidings_kafka, directory, {"T-1": row("T-1", "b")})
        await terminals.wait_until(timeout=SECONDS)
        await pay(sidings_kafka, payments, "T-1")
        await eventually(lambda: routed == ["a", "b"])


async def test_consumers_and_readiness_wait_for_the_directories(topic, sidings_kafka, caplog):
    payments = await topic("payments")
    directory = f"{payments}-directory"
    await pay(sidings_kafka, payments, "T-1")
    service = a_service(sidings_kafka, http="127.0.0.1:0")
    terminals = service.directory(directory, model=Acquirer)
    routed: list[str] = []

    @service.consumer(payments, stateless=True, dead_letter=f"{payments}.dlq")
    async def route(message: Message[Payment]) -> None:
        routed.append(terminals[message.value.terminal].acquirer_id)

    async with service:
        await eventually(lambda: "there is no topic" in caplog.text)
        assert await status(service, "/ready") == 503
        told = service._life.not_ready()
        assert terminals.not_ready()[0] in told, "a service without consumers would be ready"
        assert "the consumer has no assignment yet" in told
        assert await status(service, "/health") == 200, "waiting is no illness"
        assert not service._life.consumer.joined
        assert not terminals.ready
        await create_topic(sidings_kafka, directory, partitions=1, config=COMPACTED)
        await eventually(lambda: service._life.consumer.joined)
        assert terminals.ready
        await put(sidings_kafka, directory, {"T-1": row("T-1", "a")})
        await eventually(lambda: routed == ["a"])  # its first attempts found nothing

        async def ready() -> bool:
            return await status(service, "/ready") == 200

        await eventually(ready)


async def test_a_service_whose_directory_can_read_none_of_its_rows_is_not_ready(topic, sidings_kafka):
    """It handled messages without them, and a rolling update went through."""
    payments, directory = await topic("payments"), await topic("terminals", config=COMPACTED)
    await pay(sidings_kafka, payments, "T-1")
    await put(sidings_kafka, directory, {"T-1": b"{}"})

    def a_release() -> tuple[Any, list[str]]:
        service, routed = a_service(sidings_kafka, http="127.0.0.1:0"), list[str]()
        terminals = service.directory(directory, model=Acquirer)

        @service.consumer(payments, stateless=True, dead_letter=f"{payments}.dlq")
        async def route(message: Message[Payment]) -> None:
            routed.append(terminals[message.value.terminal].acquirer_id)

        return service, routed

    async def answers(service: Any, text: str) -> None:
        await eventually(lambda: text in str(service._life.not_ready()), service._life.not_ready)
        assert await status(service, "/ready") == 503
        assert await status(service, "/health") == 200

    service, routed = a_release()
    async with asyncio.timeout(SECONDS), service:
        await answers(service, "1 bad")  # and it stops while it waits
    assert routed == []
    service, routed = a_release()
    async with service:
        await answers(service, "1 bad")
        await put(sidings_kafka, directory, {"T-1": row("T-1", "a")})
        await eventually(lambda: routed == ["a"])


@pytest.mark.parametrize("storage", [lambda path: None, SQLite], ids=["memory", "sqlite"])
async def test_what_callbacks_build_is_complete_when_handlers_run(topic, sidings_kafka, tmp_path, storage):
    """A dict that `on_change` filled was empty after each start, as it is not told of the load. With a file a start
    reads nothing anew, and it was empty all the same."""
    payments, directory = await topic("payments"), await topic("terminals", partitions=2, config=COMPACTED)
    for partition in (0, 1):
        rows = {f"T-{n}": row(f"T-{n}", f"a{n % 3}") for n in range(partition, 1_500, 2)}
        await put(sidings_kafka, directory, rows, partition=partition)
    for start in range(2):
        service = a_service(sidings_kafka)
        terminals = service.directory(directory, model=Acquirer, storage=storage(tmp_path / "terminals.db"))
        built, told, found = dict[Any, Any](), list[tuple[Any, bool]](), list[tuple[int, bool]]()

        @terminals.on_change(load=True)
        def build(change: Changed[Acquirer], built=built, told=told, terminals=terminals) -> None:
            assert built.get(change.key) == change.old
            built[change.key] = change.new
            told.append((change.key, terminals.ready))

        @service.consumer(payments, stateless=True, dead_letter=f"{payments}.dlq")
        async def look(message: Message[Payment], built=built, found=found, terminals=terminals) -> None:
            found.append((len(built), built == dict(terminals.items())))

        await pay(sidings_kafka, payments, "T-1")
        async with service:
            await eventually(lambda found=found: found)
            assert found[0] == (1_500, True)
            assert sorted(told) == sorted((key, False) for key in built), "each once, and before anything else"
            await put(sidings_kafka, directory, {"T-2": row("T-2", f"b{start}")})
            await terminals.wait_until(timeout=SECONDS)
            assert told[1_500:] == [("T-2", True)]
            assert built == dict(terminals.items())


async def test_jobs_wait_for_the_directories(database, topic, sidings_kafka, caplog):
    directory = await topic() + "-directory"
    service = a_service(sidings_kafka, postgres=database, executor=ExecutorSettings(poll_seconds=0.02))
    terminals = service.directory(directory, model=Acquirer)
    ran: list[int] = []

    @service.job()
    async def settle(job: Job[Ride]) -> None:
        ran.append(len(terminals))

    origin = f"{directory}-jobs/0"
    async with service:
        service.executor.assign([origin])
        await enqueue(database, settle, [Ride()], origin=origin)
        await eventually(lambda: "there is no topic" in caplog.text)
        assert ran == []
        assert not service.executor.held
        assert "the executor does not run" not in service.problems(), "it is not meant to yet"
        await create_topic(sidings_kafka, directory, partitions=1, config=COMPACTED)
        await eventually(lambda: ran == [0])
        await eventually(lambda: service.problems() == [])


async def test_a_service_stops_at_once_while_it_waits(database, topic, sidings_kafka, caplog, monkeypatch):
    for what in ("DRAIN", "LEAVE"):  # neither of them is needed
        monkeypatch.setattr(f"sidings.service.life._{what}_SECONDS", 3_600.0)
    started: list[KafkaExecutor] = []
    monkeypatch.setattr(KafkaExecutor, "start", lambda executor: started.append(executor))
    payments = await topic("payments")
    service = a_service(sidings_kafka, postgres=database, executor=ExecutorSettings(shutdown_seconds=3_600))
    service.directory(f"{payments}-nowhere", model=Acquirer)

    @service.consumer(payments, stateless=True, dead_letter=f"{payments}.dlq")
    async def route(message: Message[Payment]) -> None: ...

    async with asyncio.timeout(SECONDS):
        async with service:
            await eventually(lambda: "there is no topic" in caplog.text)
        began = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - began < SECONDS
    assert not started, "the executor is not started any more"


async def test_a_service_that_stops_while_its_executor_starts_lets_it_end_that(
    database, topic, sidings_kafka, monkeypatch
):
    name = await topic("terminals", config=COMPACTED)
    steps: list[str] = []
    starting, go_on, stopping, leave = (asyncio.Event() for _ in range(4))
    start, stop = KafkaExecutor.start, KafkaExecutor.stop

    async def slow_start(executor: KafkaExecutor) -> None:
        starting.set()
        await go_on.wait()
        await start(executor)
        steps.append("started")

    async def told_stop(executor: KafkaExecutor) -> None:
        stopping.set()
        steps.append("stopped")
        await stop(executor)

    monkeypatch.setattr(KafkaExecutor, "start", slow_start)
    monkeypatch.setattr(KafkaExecutor, "stop", told_stop)
    service = a_service(sidings_kafka, postgres=database)
    service.directory(name, model=Acquirer)

    async def live() -> None:
        async with service:
            await leave.wait()

    living = asyncio.create_task(live())
    await asyncio.wait_for(starting.wait(), SECONDS)
    leave.set()
    with suppress(TimeoutError):
        await asyncio.wait_for(stopping.wait(), 0.2)  # in vain
    go_on.set()
    await asyncio.wait_for(living, SECONDS)
    assert steps == ["started", "stopped"]


async def test_a_service_with_directories_stops_at_once_while_kafka_hangs(monkeypatch):
    """Each directory waited for an answer for 10 s, one after the other."""
    monkeypatch.setattr("sidings.service.life._LEAVE_SECONDS", 3_600.0)
    asked = asyncio.Event()
    server = await asyncio.start_server(lambda *_: asked.set(), "127.0.0.1", 0)
    service = a_service(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    for name in ("one", "two", "three"):
        service.directory(name, model=Acquirer)
    async with asyncio.timeout(SECONDS), service:
        await asked.wait()
    server.close()  # `async with server` would wait for its ends of the connections, from Python 3.12 on


async def test_a_directory_that_cannot_be_loaded_ends_the_service(topic, sidings_kafka, tmp_path):
    name = await topic("terminals", config=COMPACTED)
    service = a_service(sidings_kafka)
    service.directory(f"{name}-nowhere", model=Acquirer, load_seconds=0.5)
    with pytest.raises(DirectoryNotReady, match="there is no topic"):
        async with service:
            await asyncio.sleep(SECONDS)
    (tmp_path / "file").touch()
    service = a_service(sidings_kafka)
    service.directory(name, model=Acquirer, storage=SQLite(tmp_path / "file" / "terminals.db"))
    with pytest.raises(StorageError) as raised:
        async with service:
            await asyncio.sleep(SECONDS)
    assert isinstance(raised.value.__cause__, OSError)


async def test_nothing_reads_a_directory_that_could_not_be_loaded_where_nobody_can_end_the_service(
    topic, sidings_kafka, monkeypatch
):
    """As where the cell of a notebook that has started it has ended."""
    begun: list[Consumer] = []

    async def run(consumer: Consumer) -> None:
        if not consumer._stopping.is_set():
            begun.append(consumer)
        consumer._drained.set()

    monkeypatch.setattr(Consumer, "run", run)
    payments = await topic("payments")
    service = a_service(sidings_kafka)
    service.directory(f"{payments}-nowhere", model=Acquirer, load_seconds=0.1)

    @service.consumer(payments, stateless=True, dead_letter=f"{payments}.dlq")
    async def route(message: Message[Payment]) -> None: ...

    await asyncio.create_task(service.__aenter__())
    await eventually(lambda: any("has ended unexpectedly" in problem for problem in service.problems()))
    await asyncio.sleep(0.05)
    assert begun == []
    with pytest.raises(DirectoryNotReady):
        await service.__aexit__(None, None, None)


def test_wrong_declarations_are_refused():
    with pytest.raises(ConfigurationError, match="needs Kafka"):
        a_service(None, postgres="postgresql://nowhere").directory("terminals", model=Acquirer)
    with pytest.raises(ConfigurationError, match="needs Kafka"):
        a_service(None, assignment=StaticAssignment(["t/0"])).directory("terminals", model=Acquirer)

    for options, text in [
        ({"storage": "terminals.db"}, r"storage='terminals.db': give SQLite\(path\)"),
        ({"storage": SQLite}, "storage=.*SQLite"),
        ({"load_seconds": "5"}, "load_seconds='5': give a positive number of seconds, or None"),
    ]:
        with pytest.raises(ConfigurationError, match=text):
            a_service("localhost:1").directory("terminals", model=Acquirer, **options)
    with pytest.raises(ConfigurationError, match="kafka=None: give 'host:port'"):
        Directory("terminals", kafka=None, model=Acquirer)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"SQLite\(''\): give the path"):
        SQLite("")

    async def twice() -> None:
        service = a_service("localhost:1")
        service.directory("terminals", model=Acquirer)
        with pytest.raises(ConfigurationError, match="two directories"):
            service.directory("terminals", model=Acquirer)

    asyncio.run(twice())


class StuckStore(Memory[Any]):
    def __init__(self) -> None:
        super().__init__()
        self.entered = asyncio.Event()

    async def open(self, plan: Plan[Any]) -> Kept:
        self.entered.set()
        await asyncio.Event().wait()
        return await super().open(plan)


async def test_a_directory_ends_with_its_service_although_the_stop_is_cancelled_again_and_again():
    """As anyio's cancel scopes do. One whose store hangs went on for as long as the process lived."""
    tasks, store, service = asyncio.all_tasks(), StuckStore(), a_service("127.0.0.1:1")
    service.directory("terminals", model=Acquirer, storage=store)

    async def live() -> None:
        async with service:
            await asyncio.Event().wait()

    living = asyncio.create_task(live())
    await asyncio.wait_for(store.entered.wait(), SECONDS)
    await eventually(lambda: service._life.running)
    while not living.done():
        living.cancel()
        await asyncio.sleep(0)
    assert living.cancelled()
    await eventually(lambda: asyncio.all_tasks() == tasks, asyncio.all_tasks)
