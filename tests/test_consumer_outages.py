"""The consumer while processes and servers die, pause and come back: effects exactly once, none missing."""

import asyncio
import contextlib
import random
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError
from sidings import Job, KafkaSettings, KafkaUnavailable, Message, Transaction, migrate
from sidings.devstack.topics import create_topic
from sidings.executor.watchdog import EXIT_CODE
from sidings.kafka import membership
from sidings.kafka.vitals import _silence

from .consumer_support import (
    TWICE_AND_PARK,
    Number,
    a_service,
    administering,
    as_json,
    effects_table,
    numbers,
    offset_reaches,
    produce,
    producing,
    record,
    sample,
)
from .support import SECONDS, Ride, connected, eventually, fetch, value

WORKER = Path(__file__).with_name("consumer_worker.py")


@contextlib.asynccontextmanager
async def steady_stream(bootstrap: str, topic: str, partitions: int, *, pause: float = 0.002):
    """Produces numbers without an end over several partitions and keys; yields a list that grows with what Kafka has
    acknowledged: (partition, number)."""
    sent: list[tuple[int, int]] = []
    enough = asyncio.Event()

    async def flow() -> None:
        async with producing(bootstrap) as producer:
            n = 0
            while not enough.is_set():
                partition = n % partitions
                key = f"key-{partition}-{n % 7}".encode()
                await producer.send_and_wait(topic, as_json(n), key=key, partition=partition)
                sent.append((partition, n))
                n += 1
                await asyncio.sleep(pause)

    flowing = asyncio.create_task(flow())
    try:
        yield sent
    finally:
        enough.set()
        await asyncio.wait_for(flowing, SECONDS)


async def assert_each_once(dsn: str, sent: list[tuple[int, int]], via: str = "message") -> None:
    rows = await fetch(dsn, "SELECT partition, number FROM effect WHERE via = $1 ORDER BY id", via)
    done = [tuple(row) for row in rows]
    assert len(done) == len(set(done)), "some message took effect twice"
    assert set(done) == set(sent), "some message took no effect"


async def assert_order_of_keys(dsn: str, via: str = "message") -> None:
    rows = await fetch(dsn, "SELECT key, number FROM effect WHERE via = $1 ORDER BY id", via)
    by_key: dict[str, list[int]] = {}
    for row in rows:
        by_key.setdefault(row["key"], []).append(row["number"])
    assert all(found == sorted(found) for found in by_key.values()), by_key


class Crew:
    """Worker processes, in numbered places; whatever they say goes to one log file each."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.places: list[asyncio.subprocess.Process] = []
        self._all: list[asyncio.subprocess.Process] = []
        self._directory = directory
        self._arguments = arguments

    async def spawn(self) -> asyncio.subprocess.Process:
        with (self._directory / f"worker-{len(self._all)}.log").open("w") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, str(WORKER), *self._arguments, stdout=log, stderr=log
            )
        self._all.append(process)
        return process

    async def fill(self, count: int) -> None:
        self.places = [await self.spawn() for _ in range(count)]

    async def replace(self, place: int, how: signal.Signals, *allowed: int) -> None:
        """End one, by a signal, and put another into its place. It must end as the signal asks for."""
        process = self.places[place]
        if process.returncode is None:
            process.send_signal(how)
        code = await asyncio.wait_for(process.wait(), SECONDS)
        # By the signal itself also where it came before the worker could take it.
        assert code in (0, -how, *allowed), f"{code}: {self.log_of(process)}"
        self.places[place] = await self.spawn()

    def log_of(self, process: asyncio.subprocess.Process) -> str:
        return (self._directory / f"worker-{self._all.index(process)}.log").read_text()[-4000:]

    async def stop(self) -> None:
        for place in range(len(self.places)):
            await self.replace(place, signal.SIGTERM, EXIT_CODE)
        await self.kill()

    async def kill(self) -> None:
        for process in self._all:
            if process.returncode is None:
                process.kill()
                await process.wait()


@pytest.mark.long
async def test_effects_happen_once_while_processes_are_killed(effects, topic, sidings_kafka, tmp_path):
    """Two instances, killed in turns while messages flow, some of which fail and are parked: every message and every
    job takes effect once, and each key's messages in order."""
    name = await topic(partitions=4)
    crew = Crew(tmp_path, effects, sidings_kafka, name)

    async def moved(before: int) -> bool:
        return await effect_count(effects) > before + 200

    try:
        await crew.fill(2)
        async with steady_stream(sidings_kafka, name, 4) as sent:
            for turn in range(4):
                before = await effect_count(effects)
                await eventually(lambda before=before: moved(before), "the survivors go on")
                await asyncio.sleep(random.uniform(0, 0.2))
                await crew.replace(turn % 2, signal.SIGKILL)
        await all_done(effects, name, sent, 4)
        await crew.stop()
    finally:
        await crew.kill()
    await assert_each_once(effects, sent)
    await assert_each_once(effects, sent, via="job")
    await assert_order_of_keys(effects)


@pytest.mark.chaos
@pytest.mark.timeout(400)
async def test_effects_happen_once_while_processes_are_killed_stopped_and_paused_at_random(
    effects, topic, sidings_kafka, tmp_path
):
    """Three instances and twenty partitions; a paused one comes back as a zombie in the middle of whatever it did."""
    name = await topic(partitions=20)
    crew = Crew(tmp_path, effects, sidings_kafka, name)
    try:
        await crew.fill(3)
        async with steady_stream(sidings_kafka, name, 20, pause=0.001) as sent:
            until = asyncio.get_running_loop().time() + 90
            while asyncio.get_running_loop().time() < until:
                await asyncio.sleep(random.uniform(1, 5))
                place = random.randrange(3)
                match random.choice(["kill", "stop", "pause"]):
                    case "kill":
                        await crew.replace(place, signal.SIGKILL, EXIT_CODE)
                    case "stop":
                        await crew.replace(place, signal.SIGTERM, EXIT_CODE)
                    case _:
                        if crew.places[place].returncode is None:
                            crew.places[place].send_signal(signal.SIGSTOP)
                            await asyncio.sleep(random.uniform(0.5, 8))
                            crew.places[place].send_signal(signal.SIGCONT)
        for place, process in enumerate(crew.places):
            if process.returncode is not None:  # ended by its watchdog, as it should
                await crew.replace(place, signal.SIGKILL, EXIT_CODE)
        await all_done(effects, name, sent, 20)
    finally:
        await crew.kill()
    await assert_each_once(effects, sent)
    await assert_each_once(effects, sent, via="job")
    await assert_order_of_keys(effects)


async def effect_count(dsn: str) -> int:
    return await value(dsn, "SELECT count(*) FROM effect")


async def all_done(dsn: str, topic: str, sent: list[tuple[int, int]], partitions: int) -> None:
    """Every message is consumed, and no job is left."""

    async def no_job_left() -> bool:
        return await value(dsn, "SELECT count(*) FROM sidings.job") == 0

    for partition in range(partitions):
        count = sum(p == partition for p, _ in sent)
        await eventually(offset_reaches(dsn, topic, count, partition), seconds=90)
    await eventually(no_job_left, seconds=90)


async def test_a_rebalance_keeps_running_jobs_and_loses_no_message(effects, topic, sidings_kafka):
    name = await topic(partitions=4)
    begun, go_on = asyncio.Event(), asyncio.Event()
    interrupted: list[str] = []

    def another():
        service = a_service(effects, sidings_kafka, executor={"lease_seconds": 15.0})

        @service.job()
        async def long_one(job: Job[Ride]) -> None:
            begun.set()
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                interrupted.append(job.origin)
                raise

        @service.consumer(name)
        async def handle(message: Message[Number], tx: Transaction) -> None:
            await record(message, tx)
            if message.value.n == 0:
                await long_one.enqueue(tx, Ride())

        return service

    async with steady_stream(sidings_kafka, name, 4) as sent, another() as first:
        await asyncio.wait_for(begun.wait(), SECONDS)
        epochs = dict(first.executor.held)
        for _ in range(3):  # join and leave
            async with another() as second:
                await eventually(lambda: len(second.executor.held) >= 1)
                before = len(await numbers(effects))
                await eventually(lambda before=before: grown(effects, before + 50))
                assert set(first.executor.held) | set(second.executor.held) == set(epochs)
            await eventually(lambda: len(first.executor.held) == 4)
        # What stayed here kept its lease over six rebalances, and the job that ran in it was left in peace.
        kept = [origin for origin, epoch in epochs.items() if first.executor.held[origin] == epoch]
        assert kept
        assert interrupted == []
        await eventually(lambda: len(sent) >= 400)
        go_on.set()
    async with another():
        for partition in range(4):
            await eventually(offset_reaches(effects, name, sum(p == partition for p, _ in sent), partition))
    await assert_each_once(effects, sent)
    await assert_order_of_keys(effects)


@pytest.mark.long
async def test_instances_come_and_go_with_a_hundred_partitions(effects, topic, sidings_kafka):
    """3, then 4, then 2 instances while messages flow and jobs run: each message and each job once, in order, and no
    two jobs of a group at once."""
    name = await topic(partitions=100)
    at_work: set[str] = set()
    overlaps: list[str] = []

    def another():
        settings = {"fetch_seconds": 0.05, "session_seconds": 3.0}
        service = a_service(effects, sidings_kafka, settings=settings, executor={"concurrency": 50})

        @service.job(group="transport", transactional=True)
        async def follow_up(job: Job[Ride]) -> None:
            group = f"{job.origin} {job.group}"
            if group in at_work:
                overlaps.append(group)
            at_work.add(group)
            try:
                await asyncio.sleep(random.uniform(0, 0.05))
                await job.tx.execute(
                    "INSERT INTO effect (partition, key, number, via) VALUES ($1, $2, $3, 'job')",
                    *(int(job.origin.rpartition("/")[2]), job.payload.transport, job.payload.number),
                )
            finally:
                at_work.discard(group)

        @service.consumer(name)
        async def handle(message: Message[Number], tx: Transaction) -> None:
            await record(message, tx)
            await follow_up.enqueue(tx, Ride(transport=message.key_text or "", number=message.value.n))

        return service

    async def shared(*services) -> None:
        """Each holds its share, and together they hold everything."""

        def settled() -> bool:
            held = [len(service.executor.held) for service in services]
            return sum(held) == 100 and max(held) - min(held) <= 1

        await eventually(settled, lambda: [len(service.executor.held) for service in services])
        before = len(await numbers(effects))
        await eventually(lambda: grown(effects, before + 100))

    async with steady_stream(sidings_kafka, name, 100, pause=0.001) as sent, contextlib.AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(another()) for _ in range(2)]
        async with another() as three:
            await shared(one, two, three)
            async with another() as four:
                await shared(one, two, three, four)
        await shared(one, two)
        messages = list(sent)
        await eventually(lambda: grown(effects, 2 * len(messages)))
    async with another():
        await all_done(effects, name, sent, 100)
    await assert_each_once(effects, sent)
    await assert_each_once(effects, sent, via="job")
    await assert_order_of_keys(effects)
    await assert_order_of_keys(effects, via="job")
    assert overlaps == []


async def grown(dsn: str, size: int) -> bool:
    return len(await numbers(dsn)) >= size


def postgres_failures(service: Any) -> float:
    """How often the consumer has found Postgres away."""
    return sample(service, "sidings_consumer_errors_total", server="postgres")


@pytest.mark.long
async def test_effects_happen_once_while_postgres_is_killed_and_paused(own_postgres, topic, sidings_kafka):
    postgres = own_postgres()
    await migrate(postgres.dsn, service="test")
    await effects_table(postgres.dsn)
    name = await topic(partitions=2)
    service = a_service(postgres.dsn, sidings_kafka)
    service.consumer(name, model=Number, timeout=2.0)(record)
    async with steady_stream(sidings_kafka, name, 2) as sent, service:
        await eventually(lambda: service._life.consumer.joined)
        generation = service.executor._reconciler.generation
        for disturb, restore in [
            (postgres.kill, postgres.start),
            (postgres.restart, lambda: None),
            (postgres.pause, postgres.resume),
        ]:
            before = len(await numbers(postgres.dsn))
            await eventually(lambda before=before: grown(postgres.dsn, before + 100))
            failures = postgres_failures(service)
            await asyncio.to_thread(disturb)
            await eventually(lambda failures=failures: postgres_failures(service) > failures, "it notices the outage")
            await asyncio.to_thread(restore)
        before = len(await numbers(postgres.dsn))
        await eventually(lambda: grown(postgres.dsn, before + 100))
        await eventually(lambda: service.problems() == [], service.problems)
        assert service.executor._reconciler.generation == generation  # it has stayed in the group all the time
    async with connected(postgres.dsn) as connection:
        stored = {
            row["partition"]: row["next_offset"]
            for row in await connection.fetch("SELECT * FROM sidings.consumer_offset")
        }
    rows = await fetch(postgres.dsn, "SELECT partition, number FROM effect ORDER BY id")
    expected = [(p, n) for index, (p, n) in enumerate(sent) if index // 2 < stored[p]]
    assert sorted(tuple(row) for row in rows) == sorted(expected)  # each once, none missing up to what is stored
    assert await value(postgres.dsn, "SELECT count(*) FROM sidings.job") == 0  # an outage is no message's fault


def silence(service: Any) -> float:
    """For how many seconds Kafka has said nothing about any partition."""
    vitals = service._life.consumer.vitals
    return min((_silence(partition) for partition in vitals._partitions()), default=0.0)


@pytest.mark.chaos
async def test_a_partition_without_a_leader_keeps_no_other_from_being_placed(effects, own_kafka, monkeypatch):
    """aiokafka answers where the logs of many partitions begin when it knows that of all."""
    monkeypatch.setattr("sidings.kafka.placing._TOGETHER_SECONDS", 1.0)
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 1.0)
    kafka = await asyncio.to_thread(own_kafka, brokers=2)
    await create_topic(kafka.bootstrap, "positions", partitions=6)
    for partition in range(6):
        await produce(kafka.bootstrap, "positions", [partition], partition=partition)
    async with administering(kafka.bootstrap) as admin:
        (described,) = await admin.describe_topics(["positions"])
    led = sorted(one["partition"] for one in described["partitions"] if one["leader"] == 1)
    assert 0 < len(led) < 6
    service = a_service(effects, kafka.bootstrap)
    service.consumer("positions", model=Number)(record)
    await asyncio.to_thread(kafka.broker(2).kill)

    async def those_with_a_leader() -> bool:
        return sorted(await numbers(effects)) == led

    async with service:
        await eventually(those_with_a_leader, seconds=2 * SECONDS)
        await eventually(lambda: any("Kafka does not say" in problem for problem in service.problems()))
        await asyncio.to_thread(kafka.broker(2).start)
        for partition in range(6):
            await eventually(offset_reaches(effects, "positions", 1, partition), seconds=2 * SECONDS)
        await eventually(lambda: not service.problems())
    assert sorted(await numbers(effects)) == list(range(6))


async def test_a_client_whose_broker_hangs_leaves_nothing_behind(own_kafka, monkeypatch):
    monkeypatch.setattr(membership, "_CLOSE_SECONDS", 0.5)
    kafka = await asyncio.to_thread(own_kafka)
    await create_topic(kafka.bootstrap, "positions", partitions=1)
    tasks = asyncio.all_tasks()
    settings = KafkaSettings(bootstrap=kafka.bootstrap)
    alone = AIOKafkaConsumer(**settings.client_options(), auto_offset_reset="none")
    alone.assign([TopicPartition("positions", 0)])
    for client in (membership.make_client(settings, "test"), alone):
        await membership.connect(client, asyncio.Event(), SECONDS)
        if client is not alone:
            client.subscribe(["positions"])
            await eventually(client.assignment)
        client.seek(TopicPartition("positions", 0), 0)
        await asyncio.to_thread(kafka.pause)
        await asyncio.wait_for(membership.close(client), SECONDS)
        await asyncio.to_thread(kafka.resume)
        await eventually(lambda: asyncio.all_tasks() == tasks, lambda: asyncio.all_tasks() - tasks, seconds=5)
        port = int(kafka.bootstrap.rpartition(":")[2])
        assert not [c for c in psutil.Process().net_connections() if c.raddr and c.raddr.port == port]


@pytest.mark.parametrize("again", [False, True], ids=["once", "again and again"])
async def test_a_client_leaves_nothing_behind_where_its_closing_is_cancelled(own_kafka, again):
    """Its tasks went on for as long as the process lived, heartbeats that came to nothing ten times a second."""
    kafka = await asyncio.to_thread(own_kafka)
    await create_topic(kafka.bootstrap, "positions", partitions=8)
    tasks = asyncio.all_tasks()
    client = membership.make_client(KafkaSettings(bootstrap=kafka.bootstrap), "test")
    await membership.connect(client, asyncio.Event(), SECONDS)
    client.subscribe(["positions"])
    await eventually(client.assignment)
    await asyncio.to_thread(kafka.pause)
    closing = asyncio.create_task(membership.close(client))
    await asyncio.sleep(0.5)
    closing.cancel()
    while again and not closing.done():
        closing.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([closing], timeout=SECONDS)
    assert closing.cancelled()
    await eventually(lambda: asyncio.all_tasks() == tasks, lambda: asyncio.all_tasks() - tasks, seconds=5)


async def test_a_client_that_waits_to_fetch_again_is_closed_without_ado(topic, sidings_kafka, caplog):
    """aiokafka's `stop` comes out as a cancellation then, as if somebody had cancelled us: what closes a client because
    Kafka is away would end, and its service with it."""
    before = asyncio.all_tasks()
    client = membership.make_client(KafkaSettings(bootstrap=sidings_kafka), "test")
    await membership.connect(client, asyncio.Event(), SECONDS)
    client.assign([TopicPartition(await topic(), 0)])
    client.seek(*client.assignment(), 0)
    fetcher = client._fetcher
    fetcher._retry_backoff = SECONDS
    await eventually(lambda: fetcher._pending_tasks)

    def cut_off() -> bool:  # more than once: the fetch may be about to be sent, over a connection that is made then
        failed = "Failed fetch messages" in caplog.text
        for connection in [] if failed else list(client._client._conns.values()):
            connection.close()
        return failed

    await eventually(cut_off)
    await membership.close(client)
    assert asyncio.current_task().cancelling() == 0
    await eventually(lambda: asyncio.all_tasks() <= before)


def lead_astray(client: AIOKafkaConsumer) -> None:
    """What the client knows of the brokers is no longer true; the addresses that it was given are."""
    inner: Any = client._client
    for node, broker in inner.cluster._brokers.items():
        inner.cluster._brokers[node] = broker._replace(port=1)
    for connection in list(inner._conns.values()):
        connection.close()


async def test_brokers_that_have_all_got_other_addresses_are_found_again(
    effects: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiokafka asked the brokers that it knew, for ever."""
    monkeypatch.setattr(membership, "_LOST_SECONDS", 0.5)
    names = [await topic(), await topic(), await topic(config={"cleanup.policy": "compact"})]
    service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "session_seconds": 1.0})
    seen: set[tuple[str, int]] = set()

    @service.consumer(names[0])
    async def ordinary(message: Message[Number], tx: Transaction) -> None:
        seen.add(("ordinary", message.value.n))

    @service.consumer(names[1], stateless=True, dead_letter="dead")
    async def stateless(message: Message[Number]) -> None:
        seen.add(("stateless", message.value.n))

    directory = service.directory(names[2], model=Number)

    async def everything_arrives(n: int) -> None:
        async with producing(sidings_kafka) as producer:
            for name in names:
                await producer.send_and_wait(name, as_json(n), key=b"k")
        await eventually(lambda: seen >= {("ordinary", n), ("stateless", n)}, lambda: seen)
        await eventually(lambda: directory["k"].n == n)

    async with service:
        await everything_arrives(1)
        lead_astray(service._life.consumer._client)
        lead_astray(directory._follower.reader._client)
        await everything_arrives(2)


@pytest.mark.long
@pytest.mark.parametrize("assigned", [True, False])
async def test_health_tells_of_a_kafka_that_is_away_from_its_beginning_to_its_end(
    effects: str, own_kafka, monkeypatch: pytest.MonkeyPatch, assigned: bool
) -> None:
    """It told after a minute, and all was well again for a quarter of one, when the clients had been made anew. One
    that waited for its first assignment never was: it asked the brokers that it knew, for ever."""
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 0.5)
    monkeypatch.setattr("sidings.kafka.vitals._STEADY_SECONDS", 0.5)
    monkeypatch.setattr("sidings.kafka.directory.directory._UNREACHABLE_SECONDS", 0.5)
    monkeypatch.setattr(membership, "_LOST_SECONDS", 2.0)
    kafka = await asyncio.to_thread(own_kafka)
    await create_topic(kafka.bootstrap, "positions", partitions=1)
    await create_topic(kafka.bootstrap, "terminals", partitions=1, config={"cleanup.policy": "compact"})
    service = a_service(effects, kafka.bootstrap, settings={"session_seconds": 1.0})
    service.consumer("positions", model=Number)(record)
    directory = service.directory("terminals", model=Number)

    def told() -> tuple[bool, bool]:
        problems = service.problems()
        return any("consumer" in one for one in problems), any("'terminals'" in one for one in problems)

    async with service:
        consumer = service._life.consumer
        await eventually(lambda: directory.ready and consumer._client is not None)
        if assigned:
            await eventually(lambda: consumer.joined and not service.problems(), seconds=2 * SECONDS)
        clients = consumer._client, directory._follower.reader
        await asyncio.to_thread(kafka.kill)
        await eventually(lambda: told() == (True, True), service.problems)

        def both_anew() -> bool:
            assert told() == (True, True), service.problems()
            return consumer._client is not clients[0] and directory._follower.reader is not clients[1]

        await eventually(both_anew, seconds=2 * SECONDS)
        await asyncio.to_thread(kafka.start)
        await eventually(lambda: not service.problems(), service.problems, seconds=2 * SECONDS)


async def test_one_question_without_an_answer_is_no_lost_cluster(sidings_kafka: str, topic, monkeypatch):
    """It was not asked again before the metadata were too old, which took as long as it takes to give the client up."""
    monkeypatch.setattr(membership, "_LOST_SECONDS", 1.0)
    client: Any = membership.make_client(KafkaSettings(bootstrap=sidings_kafka, metadata_seconds=60), "test")
    client.subscribe([await topic()])
    await client.start()
    try:
        contact = membership.Contact(client)
        with monkeypatch.context() as away:
            away.setattr(client._client, "_get_conn", lambda *_, **__: asyncio.sleep(0))
            assert await client._client.force_metadata_update() is False
        contact.check()
        assert contact.lost_since is not None
        async with asyncio.timeout(SECONDS):
            while contact.lost_since is not None:
                await asyncio.sleep(0.05)
                contact.check()  # raises where it is given up
    finally:
        await client.stop()


async def test_what_the_former_client_had_waits_until_the_next_one_is_given_it(
    effects: str, sidings_kafka: str, topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was placed at once, of which aiokafka makes an AssertionError: the service ended."""
    names, subscribe, clients = [await topic(), await topic()], AIOKafkaConsumer.subscribe, list[AIOKafkaConsumer]()
    service = a_service(effects, sidings_kafka, settings={"fetch_seconds": 0.05, "group": names[0]})
    service.consumer(names[0], model=Number)(record)
    seen = list[int]()

    @service.consumer(names[1], stateless=True, dead_letter="dead")
    async def stateless(message: Message[Number]) -> None:
        seen.append(message.value.n)

    def late(self: AIOKafkaConsumer, *args: Any, **options: Any) -> None:
        """As where the group takes its time."""
        clients.append(self)
        asyncio.get_running_loop().call_later(
            0.5 if len(clients) > 1 else 0.0, lambda: subscribe(self, *args, **options)
        )

    async def break_off() -> None:
        raise KafkaError("broken")

    async def everything_arrives(*n: int) -> None:
        for name in names:
            await produce(sidings_kafka, name, n[-1:])
        await eventually(offset_reaches(effects, names[0], len(n)))
        await eventually(lambda: {*seen} == {*n})

    monkeypatch.setattr(AIOKafkaConsumer, "subscribe", late)
    async with service:
        await everything_arrives(1)
        consumer = service._life.consumer
        consumer.spawn(break_off())
        await eventually(lambda: len(clients) == 2)
        while not clients[1].assignment():
            assert {p.state.name for p in consumer._partitions()} == {"UNPLACED"}
            consumer.place()  # as whoever has learned something of the topics
            await asyncio.sleep(0.01)
        await everything_arrives(1, 2)
    assert await numbers(effects) == [1, 2]


@pytest.mark.parametrize("how", ["breaks", "task"])
async def test_what_a_handler_raises_when_its_connection_to_kafka_is_given_up_is_no_failure(
    effects, topic, sidings_kafka, monkeypatch, how
):
    """It ended the service. So is a loop that somebody has cancelled missed at once, not by its messages only."""
    getmany, at_work, broken = AIOKafkaConsumer.getmany, asyncio.Event(), False

    async def breaking(self: AIOKafkaConsumer, *args: Any, **options: Any) -> Any:
        nonlocal broken
        if how == "breaks" and at_work.is_set() and not broken:
            broken = True
            raise KafkaError("broken")
        return await getmany(self, *args, **options)

    monkeypatch.setattr(AIOKafkaConsumer, "getmany", breaking)
    name = await topic()
    await produce(sidings_kafka, name, range(2))
    service = a_service(effects, sidings_kafka)

    @service.consumer(name, model=Number, retry=TWICE_AND_PARK, timeout=None)
    async def handle(message: Message[Number], tx: Transaction) -> None:
        await record(message, tx)
        if not at_work.is_set():
            at_work.set()
            if how == "task":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                return
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise ConnectionError("it could not be closed") from None

    async with service:
        await eventually(offset_reaches(effects, name, 2))
        assert sample(service, "sidings_consumer_failures_total") == 0
    assert await numbers(effects) == [0, 1]


@pytest.mark.long
async def test_a_connection_that_breaks_again_and_again_does_not_look_like_health(
    effects, topic, sidings_kafka, monkeypatch
):
    monkeypatch.setattr("sidings.kafka.vitals._UNREACHABLE_SECONDS", 3.0)
    monkeypatch.setattr("sidings.kafka.consumer._MAX_PAUSE_SECONDS", 0.1)  # no pause alone is as long
    getmany, broken = AIOKafkaConsumer.getmany, True

    async def failing(self: AIOKafkaConsumer, *args: Any, **options: Any) -> Any:
        if broken:
            raise KafkaError("broken")
        return await getmany(self, *args, **options)

    monkeypatch.setattr(AIOKafkaConsumer, "getmany", failing)
    name = await topic()
    await produce(sidings_kafka, name, range(3))
    service = a_service(effects, sidings_kafka)
    service.consumer(name, model=Number)(record)
    async with service:
        await eventually(lambda: any("again and again: KafkaError" in problem for problem in service.problems()))
        broken = False
        await eventually(offset_reaches(effects, name, 3))
        await eventually(lambda: not service.problems())
    assert await numbers(effects) == [0, 1, 2]


async def test_a_record_that_is_damaged_stops_its_partition_until_it_is_mended(effects, own_kafka, monkeypatch):
    monkeypatch.setattr("sidings.kafka.fetch_loop.LOOK_AGAIN_SECONDS", 0.3)
    kafka = await asyncio.to_thread(own_kafka)
    await create_topic(kafka.bootstrap, "positions", partitions=2)
    for number in range(3):  # in a batch each
        await produce(kafka.bootstrap, "positions", [number])
    [log] = Path(kafka.directory).rglob("positions-0/*.log")
    whole = log.read_bytes()
    with log.open("r+b") as file:
        file.seek(whole.index(as_json(2)))
        file.write(b"?")
    service = a_service(effects, kafka.bootstrap)
    service.consumer("positions", model=Number)(record)
    async with service:
        told = "positions/0 stands still: the record at offset 2 cannot be read (CorruptRecord"
        await eventually(lambda: any(told in problem for problem in service.problems()), service.problems)
        await produce(kafka.bootstrap, "positions", [10], partition=1)
        await eventually(offset_reaches(effects, "positions", 1, 1))
        assert await numbers(effects) == [0, 1, 10]
        log.write_bytes(whole)
        await eventually(offset_reaches(effects, "positions", 3))
        await eventually(lambda: not service.problems())
    assert await numbers(effects) == [0, 1, 10, 2]


@pytest.mark.long
async def test_it_works_over_tls_and_sasl_and_survives_the_broker(effects, own_kafka, monkeypatch):
    kafka = await asyncio.to_thread(lambda: own_kafka(secure=True))
    await create_topic(kafka.bootstrap, "positions", partitions=2)
    secured: dict[str, Any] = {
        "bootstrap": kafka.secure_bootstrap,
        "security_protocol": "SASL_SSL",
        "cafile": kafka.ca_file,
        "sasl_username": kafka.username,
        "sasl_password": kafka.password,
        "fetch_seconds": 0.05,
        "session_seconds": 3.0,
    }
    wrong: dict[str, Any] = {**secured, "sasl_password": "wrong"}
    stranger = a_service(effects, KafkaSettings(**wrong))
    stranger.consumer("positions", model=Number)(record)
    async with stranger:
        await eventually(lambda: sample(stranger, "sidings_consumer_errors_total", server="kafka") >= 1)
        assert not stranger._life.consumer.joined
        for module in ("vitals", "outbox.relay"):
            monkeypatch.setattr(f"sidings.kafka.{module}._UNREACHABLE_SECONDS", 0.2)
        why = "Invalid username or password"  # it stood in aiokafka's own log alone
        await eventually(lambda: sum(why in told for told in stranger.problems()) == 2, stranger.problems)
        with pytest.raises(KafkaUnavailable, match=why):
            await stranger.producer.send("positions", value=b"1")
    service = a_service(effects, KafkaSettings(**secured))
    service.consumer("positions", model=Number)(record)
    await produce(kafka.bootstrap, "positions", range(10))
    async with service:
        await eventually(offset_reaches(effects, "positions", 10))
        held = dict(service.executor.held)
        await asyncio.to_thread(kafka.kill)
        await eventually(lambda: silence(service) > secured["session_seconds"], "Kafka's silence outlasts the session")
        assert service.executor.held == held  # nothing is revoked because Kafka is away
        await asyncio.to_thread(kafka.start)
        await produce(kafka.bootstrap, "positions", range(10, 20))
        await produce(kafka.bootstrap, "positions", range(100, 105), partition=1)
        await eventually(offset_reaches(effects, "positions", 20))
        await eventually(offset_reaches(effects, "positions", 5, 1))
        assert service.executor.held == held
    assert await numbers(effects, "partition = 0") == list(range(20))
