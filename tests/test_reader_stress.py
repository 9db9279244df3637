"""A real executor reads what writers commit in every awkward way: nothing missed, nothing run twice, no order broken.

Writers lock their entity's row before they enqueue, take transaction ids early or late, use savepoints, roll back, and
one of them leaves its transaction open for most of the run. So positions become visible in another order than they were
handed out, in groups that run serially (design 5.2; FINDINGS 3 to 6). Commit order per entity is what must come out.
"""

import asyncio
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from random import Random
from typing import Any

import asyncpg
import pytest
from sidings.executor import Executor
from sidings.jobs import Job, OutcomeName, Registry, Retry
from sidings.schema import load_sql
from tenacity import wait_none

from .support import Ledger, Ride, connected, drained, enqueue, history, running, value

ORIGINS = ("t/0", "t/1", "t/2")
ENTITIES = 12
WRITERS = 8
TRANSACTIONS = 80  # of each writer


@dataclass
class Writers:
    """What was committed, per group in the order of the locks on its entity's row."""

    committed: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    open: int = 0

    async def run(self, dsn: str, job_type: Any) -> None:
        async with connected(dsn) as connection:
            await connection.execute(
                f"CREATE TABLE entity (id int PRIMARY KEY, n int);"
                f"INSERT INTO entity SELECT n, 0 FROM generate_series(0, {ENTITIES}) n"
            )
        done = asyncio.Event()
        long = asyncio.create_task(self._long(dsn, job_type, done))
        await asyncio.gather(*(self._writer(dsn, job_type, number) for number in range(WRITERS)))
        done.set()
        await long

    async def _writer(self, dsn: str, job_type: Any, number: int) -> None:
        random = Random(number)
        async with connected(dsn) as connection:
            for _ in range(TRANSACTIONS):
                entity = random.randrange(ENTITIES)
                ids: list[int] = []
                await connection.execute("BEGIN")
                if random.random() < 0.5:  # an early id: others overtake it before it has a position
                    await connection.execute("SELECT pg_current_xact_id()")
                    await asyncio.sleep(random.random() * 0.01)
                await connection.execute("UPDATE entity SET n = n + 1 WHERE id = $1", entity)
                for _ in range(random.choice((1, 1, 2, 3, 8))):
                    ids += await self._enqueue(connection, job_type, entity, random)
                    await asyncio.sleep(random.random() ** 3 * 0.02)
                if random.random() < 0.1:
                    await connection.execute("ROLLBACK")
                    continue
                # The row lock is still held, so nobody else can come between this note and the commit.
                self.committed[f"e{entity}"] += ids
                await connection.execute("COMMIT")

    async def _enqueue(self, connection: asyncpg.Connection, job_type: Any, entity: int, random: Random) -> list[int]:
        fate = random.random()
        if fate < 0.3:
            await connection.execute("SAVEPOINT a")
        payloads = [Ride(transport=f"e{entity}")] * random.choice((1, 1, 2))
        ids = await job_type.enqueue_many(connection, payloads, origin=ORIGINS[entity % len(ORIGINS)])
        if fate < 0.1:
            await connection.execute("ROLLBACK TO a")
            return []
        return ids

    async def _long(self, dsn: str, job_type: Any, done: asyncio.Event) -> None:
        """One transaction that stays open while all the others come and go."""
        async with connected(dsn) as connection, connection.transaction():
            await connection.execute("UPDATE entity SET n = n + 1 WHERE id = $1", ENTITIES)
            payload = Ride(transport=f"e{ENTITIES}")
            ids = [await job_type.enqueue(connection, payload, origin=ORIGINS[0]) for _ in range(10)]
            self.committed[f"e{ENTITIES}"] += ids
            await done.wait()


def little_memory(executor: Executor) -> None:
    """Refills, groups that the server leaves out, and small pages, all the time."""
    memory = executor.scheduler.memory
    memory.max_keep = memory.keep = 4
    memory.window = 8
    memory.budget = 40


@pytest.mark.parametrize("failing", [False, True], ids=["all succeed", "some fail"])
@pytest.mark.parametrize("memory", ["much memory", "little memory"])
async def test_no_commit_is_missed_or_run_twice_or_out_of_order(
    database: str, memory: str, failing: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sidings.executor.scheduler._HEAVY", 16)
    registry = Registry()
    ledger, writers, random = Ledger(), Writers(), Random(0)

    @registry.job(group="transport", retry=Retry(wait=wait_none()))
    async def ride(job: Job[Ride]) -> None:
        ledger.start(job)
        await asyncio.sleep(random.random() * 0.003)
        ledger.end(job)
        if failing and job.id % 7 == 0 and job.failures < 2:
            raise ValueError("x")

    async with running(database, registry, ORIGINS, poll_seconds=0.003, audit_seconds=0.2) as executor:
        if memory == "little memory":
            little_memory(executor)
        await writers.run(database, ride)
        await drained(database)
        assert executor.metrics.audit_found._value.get() == 0
        assert executor.metrics.unmatched._value.get() == 0
        assert executor.metrics.late_rows._value.get() > 0  # or the run has not tried what it is for
        assert executor.problems() == []

    expected = Counter({id: 3 if failing and id % 7 == 0 else 1 for ids in writers.committed.values() for id in ids})
    assert len(expected) > 300
    assert ledger.runs() == expected
    assert ledger.overlaps == []
    first_starts = {group: list(dict.fromkeys(ids)) for group, ids in ledger.by_group().items()}
    assert first_starts == {group: ids for group, ids in writers.committed.items() if ids}
    # A job's retries come before its successor, as it keeps its place.
    for ids in ledger.by_group().values():
        assert [id for n, id in enumerate(ids) if n == 0 or ids[n - 1] != id] == list(dict.fromkeys(ids))
    rows = await history(database, "job_id, outcome, finished_at, attempt")
    assert Counter(row["job_id"] for row in rows if OutcomeName(row["outcome"]).terminal) == Counter(set(expected))
    assert len(rows) == expected.total()


async def test_a_read_tells_the_first_transaction_id_that_has_not_been_handed_out(database: str):
    """And not xmax, which is the last *completed* one + 1: a transaction at work may have that id, and a position."""
    query = load_sql("sidings.executor", "read")
    nothing: tuple[Any, ...] = ([], [], [], [], None, [], [], 0, [], [], [], [], 4, None, None, 100, 1_000, 1_000, None)
    async with connected(database) as reader, connected(database) as one, connected(database) as other:
        await one.execute("BEGIN")
        await one.execute("SELECT pg_current_xact_id()")
        await other.execute("BEGIN")
        hidden = int(await other.fetchval("SELECT pg_current_xact_id()::text"))
        await one.execute("COMMIT")
        [header] = await reader.fetch(query, *nothing)
        assert header["id"] > hidden


async def test_no_commit_is_missed_while_origins_change_hands(database: str):
    """The same writers, while two executors take the origins from each other again and again."""
    registry = Registry()
    ledger, writers = Ledger(), Writers()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        ledger.start(job)
        await asyncio.sleep(0.001)
        ledger.end(job)

    async with (
        running(database, registry, ORIGINS, poll_seconds=0.005) as one,
        running(database, registry, (), poll_seconds=0.005) as two,
    ):
        little_memory(two)

        async def reassign() -> None:
            for round_ in range(2, 1_000):
                split = round_ % (len(ORIGINS) + 1)
                one.assign(ORIGINS[:split], round_)
                two.assign(ORIGINS[split:], round_)
                await one.settled(30)
                await two.settled(30)
                await asyncio.sleep(0.02)

        shuffling = asyncio.create_task(reassign())
        try:
            await writers.run(database, ride)
        finally:
            shuffling.cancel()
            await asyncio.gather(shuffling, return_exceptions=True)
        assert shuffling.cancelled(), shuffling
        one.assign(ORIGINS, 2_000)
        two.assign((), 2_000)
        await drained(database)
        assert one.metrics.audit_found._value.get() == two.metrics.audit_found._value.get() == 0
    expected = Counter({id: 1 for ids in writers.committed.values() for id in ids})
    rows = await history(database, "job_id, outcome, finished_at, attempt, executor")
    assert Counter(row["job_id"] for row in rows if row["outcome"] == "succeeded") == expected
    assert len({row["executor"] for row in rows}) == 2
    assert await value(database, "SELECT count(*) FROM sidings.job_history WHERE outcome = 'lost'") == 0
    assert ledger.overlaps == []
    first_starts = {group: list(dict.fromkeys(ids)) for group, ids in ledger.by_group().items()}
    assert first_starts == {group: ids for group, ids in writers.committed.items() if ids}


async def test_a_transaction_of_many_jobs_that_commits_late_is_read_page_by_page(database: str):
    """All at once they would not fit into memory, nor into the time of a call, were they a million."""
    registry = Registry()
    ledger = Ledger()

    @registry.job(group="transport")
    async def ride(job: Job[Ride]) -> None:
        ledger.start(job)
        ledger.end(job)

    async with running(database, registry, ORIGINS[:1], poll_seconds=0.005) as executor, connected(database) as late:
        async with late.transaction():
            payloads = [Ride(transport=f"t{n % 50}", number=n) for n in range(6_000)]
            ids = await ride.enqueue_many(late, payloads, origin=ORIGINS[0])
            for _ in range(3):  # with positions behind theirs, committed and run before them
                await enqueue(database, ride, [Ride(transport="other")], origin=ORIGINS[0])
                await drained(database)
        await drained(database)
        assert executor.metrics.late_rows._value.get() < 2_000
    assert ledger.overlaps == []
    assert sorted(id for _, id in ledger.ended)[:6_000] == ids
    assert all(runs == sorted(runs) for runs in ledger.by_group().values())
