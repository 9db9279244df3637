"""Topics get other names, as docs/operations.md says: nothing is lost, run twice or out of its order."""

import subprocess
from collections import defaultdict
from contextlib import AsyncExitStack
from typing import Any, Self

import asyncpg
import pytest
from pydantic import BaseModel
from sidings import Admin, Job, Message, Retry, Transaction
from sidings.devstack.binaries import postgres_program
from sidings.devstack.process import clean_environment
from sidings.devstack.topics import delete_topics
from sidings.kafka import partition_for
from tenacity import wait_fixed

from .consumer_support import (
    TWICE_AND_PARK,
    Number,
    a_service,
    as_json,
    offset_reaches,
    producing,
    record,
)
from .guide import perform, statements
from .outbox_support import assert_complete, emptied, numbered, publish, records, relaying
from .support import connected, eventually, fetch, jobs_left, value

PARTITIONS = 3
KEYS = [f"k-{n}" for n in range(4)]


class Fee(BaseModel):
    key: str
    n: int


class Release:
    """Two instances of a service that charges for each message, in a job and, of the parked ones, in the handler."""

    def __init__(self, dsn: str, kafka: str, topic: str, *others: str, start: Any = "earliest") -> None:
        self.mended = False
        self.stack = AsyncExitStack()
        self.services = [self._service(dsn, kafka, topic, others, start) for _ in range(2)]

    def _service(self, dsn: str, kafka: str, topic: str, topics: tuple[str, ...], start: Any) -> Any:
        service = a_service(dsn, kafka, topics=topics)

        @service.job(group="key", home=topic, payload=Fee, retry=Retry(wait=wait_fixed(0.3)), transactional=True)
        async def charge(job: Job[Any]) -> None:
            if job.payload.n % 10 == 3 and not self.mended:
                raise RuntimeError("the bank is away")
            await job.tx.execute(
                "INSERT INTO effect (key, number, via) VALUES ($1, $2, 'job')", job.group, job.payload.n
            )

        @service.job(group="key", payload=Fee, transactional=True)
        async def tell(job: Job[Any]) -> None:
            await job.tx.execute(
                "INSERT INTO effect (key, number, via) VALUES ($1, $2, 'tell')", job.group, job.payload.n
            )

        @service.consumer(topic, model=Number, retry=TWICE_AND_PARK, start=start)
        async def on_message(message: Message[Number], tx: Transaction) -> None:
            if message.value.n == 5 and not self.mended:
                raise RuntimeError("not yet")
            await record(message, tx)
            for job_type in (charge, tell):
                await job_type.enqueue(tx, Fee(key=message.key_text, n=message.value.n))

        return service

    async def __aenter__(self) -> Self:
        for service in self.services:
            await self.stack.enter_async_context(service)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stack.aclose()


async def send(kafka: str, topic: str, begin: int, end: int) -> None:
    async with producing(kafka) as producer:
        for n in range(begin, end):
            for key in KEYS:
                await producer.send(topic, as_json(n), key=key.encode())
        await producer.flush()


@pytest.mark.parametrize("start", ["earliest", "latest"])
async def test_a_consumed_topic_gets_another_name(effects, topic, sidings_kafka, start):
    positions, places = await topic(partitions=PARTITIONS), await topic(partitions=PARTITIONS)
    await send(sidings_kafka, positions, 0, 8)
    ends = [0] * PARTITIONS
    for key in KEYS:
        ends[partition_for(key.encode(), PARTITIONS)] += 8
    async with Release(effects, sidings_kafka, positions, places):
        await send(sidings_kafka, places, 8, 16)
        for partition, end in enumerate(ends):
            if end:
                await eventually(offset_reaches(effects, positions, end, partition))

        async def held() -> bool:
            query = "SELECT count(*) FROM sidings.origin WHERE split_part(origin, '/', 1) = $1 AND epoch > 0"
            return await value(effects, query, places) == PARTITIONS

        await eventually(held)
        parked = "SELECT count(*) FROM sidings.job WHERE type = $1"
        before = await value(effects, parked, f"message:{positions}")
        refused = subprocess.run(
            [postgres_program("psql"), effects, "-q"],  # it goes on behind an error
            input=statements("A consumed topic gets another name", positions=positions, places=places),
            capture_output=True,
            text=True,
            env=clean_environment(LC_ALL="C"),
        )
        assert "is held by the executor" in refused.stderr
        assert await value(effects, parked, f"message:{positions}") == before > 0
    async with connected(effects) as connection:
        await connection.execute(
            f"""SELECT sidings.enqueue('tell', '{{"key": "late", "n": 0}}', '{positions}/0', 'late', delay => '1 s');
                INSERT INTO sidings.job (type, origin, position, held) VALUES ('tell', '{positions}/1', NULL, 'why');
                INSERT INTO sidings.pause (kind, type, origin, "group", paused_by, reason) VALUES
                    ('type', 'message:{positions}', NULL, NULL, 'a', 'b'), ('group', NULL, '{positions}/2', '', '', '');
                SELECT sidings.pause_topic('{positions}', 'alice', 'a repair');
                UPDATE sidings.topic SET former = '{{2}}' WHERE topic = '{positions}'"""
        )
    async with connected(effects) as connection:
        query = "SELECT min(id) FROM sidings.job WHERE type = $1"
        discarded = await connection.fetchval(query, f"message:{positions}")
        await Admin(connection, actor="alice").discard(discarded)
    left = await jobs_left(effects)
    await perform(effects, "A consumed topic gets another name", positions=positions, places=places)
    assert await jobs_left(effects) == left
    assert await value(effects, "SELECT count(*) FROM sidings.job WHERE split_part(origin, '/', 1) <> $1", places) == 0
    assert await value(effects, "SELECT former FROM sidings.topic WHERE topic = $1", places) == [2]
    pauses = await fetch(effects, "DELETE FROM sidings.pause RETURNING type, origin")
    assert {tuple(row) for row in pauses} == {(f"message:{places}", None), (None, f"{places}/2")}
    assert await value(effects, "DELETE FROM sidings.topic_pause RETURNING topic") == places
    await fetch(effects, "DELETE FROM sidings.job WHERE held = 'why'")
    async with Release(effects, sidings_kafka, places, start=start) as new:
        for partition, end in enumerate(ends):
            if end:
                await eventually(offset_reaches(effects, places, end, partition))
        new.mended = True

        async def done() -> bool:
            return await jobs_left(effects) == 0

        async def told() -> Any:
            return await fetch(
                effects, 'SELECT type, origin, "group", state, count(*) FROM sidings.job_overview GROUP BY 1, 2, 3, 4'
            )

        try:
            await eventually(done, seconds=90)
            async with connected(effects) as connection:
                admin = Admin(connection, actor="bob")
                [ended] = await admin.requeueable(type=f"message:{places}")
                await admin.requeue(ended.job_id)
            async with producing(sidings_kafka) as producer:
                await producer.send_and_wait(places, as_json(16), key=ended.group.encode())
            await eventually(lambda: value(effects, "SELECT count(*) = 3 FROM effect WHERE number = 16"))
            await eventually(done, seconds=90)
        except BaseException:
            print(*await told(), sep="\n")
            raise
    found = defaultdict(list)
    for row in await fetch(effects, "SELECT via, key, number FROM effect ORDER BY id"):
        found[row["via"], row["key"]].append(row["number"])
    assert found["tell", "late"] == [0]
    for via in ("message", "job", "tell"):
        for key in KEYS:
            behind = [5, 16] if key == ended.group else []
            assert found[via, key] == [n for n in range(16) if n not in behind] + behind, (via, key)


async def test_a_published_topic_gets_another_name(database, topic, sidings_kafka):
    etas, arrivals = await topic(), await topic(partitions=PARTITIONS)
    await delete_topics(sidings_kafka, [etas])
    await publish(database, etas, numbered(0, 50))
    async with relaying(database, sidings_kafka, topic_patience_seconds=0.5):

        async def parked() -> bool:
            return await value(database, "SELECT count(*) FROM sidings.outbox_parked") == 50

        await eventually(parked)
    async with relaying(database, sidings_kafka), relaying(database, sidings_kafka):
        await publish(database, etas, numbered(50, 50))
        await eventually(lambda: value(database, "SELECT count(*) FROM sidings.outbox_topic"))
        with pytest.raises(asyncpg.RaiseError, match="a relay runs"):  # it would send them to both topics
            await perform(database, "A published topic gets another name", etas=etas, arrivals=arrivals)
        assert await value(database, "SELECT count(*) FROM sidings.outbox_parked") == 50
    await perform(database, "A published topic gets another name", etas=etas, arrivals=arrivals)
    await publish(database, arrivals, numbered(100, 50))
    async with relaying(database, sidings_kafka), relaying(database, sidings_kafka):
        await emptied(database)
    assert_complete(await records(sidings_kafka, arrivals), 150)


async def test_messages_that_have_waited_for_long_go_to_the_topic_of_the_other_name(database, topic, sidings_kafka):
    """What was older than it takes was parked: the time of publication passed for one that the author had given."""
    etas = await topic()
    arrivals = await topic(partitions=PARTITIONS, config={"message.timestamp.before.max.ms": "3600000"})
    await publish(database, etas, numbered(0, 50))
    await value(database, "UPDATE sidings.outbox SET published_at = published_at - interval '2 hours'")
    await perform(database, "A published topic gets another name", etas=etas, arrivals=arrivals)
    async with relaying(database, sidings_kafka):
        await emptied(database)
    assert_complete(await records(sidings_kafka, arrivals), 50)
