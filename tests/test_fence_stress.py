"""Takeovers that race cycles, with the project's own SQL: no job is ended by an epoch that has been superseded."""

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from uuid import UUID, uuid4

import asyncpg
import pytest
from sidings.schema import load_sql

from .support import connected, eventually

ORIGIN = "t/0"
LEASE = "25 milliseconds"
ACQUIRE = f"SELECT acquired_epoch FROM sidings.acquire($1, '{{{ORIGIN}}}', 1, '{LEASE}', true)"
CYCLE = load_sql("sidings.executor", "cycle")
PROMOTE = load_sql("sidings.executor", "promote")
RENEW = load_sql("sidings.executor", "renew")
RELEASE = load_sql("sidings.executor", "release")
SINCE = datetime(2026, 1, 1, tzinfo=UTC)
FENCE = " AND e.fence = its_fence"


def widened(cycle: str) -> str:
    """The cycle with a pause between its snapshot and its first write, so that races are frequent."""
    pause = "WITH w AS MATERIALIZED (SELECT pg_sleep(random() * 0.02) IS NULL AS never), me AS MATERIALIZED ("
    begin = r"FROM (sidings\.begin_cycle\([^)]*\)) AS b"
    wider, found = re.subn(begin, r"FROM w, LATERAL (SELECT \1 WHERE NOT w.never) AS b", cycle)
    assert found == 1
    return wider.replace("WITH me AS MATERIALIZED (", pause)


def array(numbers: Iterable[int]) -> str:
    return f"{{{','.join(map(str, numbers))}}}"


class Stress:
    """Three executors fight over one origin with a lease of 25 ms, and often go on after it has run out."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.cycle = widened(CYCLE)
        self.seen: dict[int, set[int]] = {}  # what each epoch found waiting
        self.count: Counter[str] = Counter()
        self.done = False

    async def run(self, takeovers: int) -> list[asyncpg.Record]:
        """Fight until there have been so many takeovers; the history."""
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(self._feed())
            for _ in range(3):
                group.create_task(self._fight(takeovers))
        connection = await asyncpg.connect(self.dsn)
        history = await connection.fetch("SELECT * FROM sidings.job_history")
        await connection.close()
        return history

    async def _feed(self) -> None:
        connection = await asyncpg.connect(self.dsn)
        while not self.done:
            await connection.execute(
                "INSERT INTO sidings.job (type, origin, payload) SELECT 'step', $1, '{}' FROM generate_series(1, 30) "
                "WHERE (SELECT count(*) FROM sidings.job) < 300",
                ORIGIN,
            )
            await asyncio.sleep(0.01)
        await connection.close()

    async def _fight(self, takeovers: int) -> None:
        connection, me = await asyncpg.connect(self.dsn), uuid4()
        await connection.execute("INSERT INTO sidings.executor (id) VALUES ($1)", me)
        while not self.done:
            epoch = await connection.fetchval(ACQUIRE, me)
            if epoch is None:
                await asyncio.sleep(random.random() * 0.01)
                continue
            self.count["acquired"] += 1
            self.done = self.done or self.count["acquired"] >= takeovers
            await self._hold(connection, me, epoch)
        await connection.close()

    async def _hold(self, connection: asyncpg.Connection, me: UUID, epoch: int) -> None:
        # The fence together with the epoch, as an executor looks both up: it may have been taken over again already.
        standing = await connection.fetchrow(
            "SELECT e.cycle, e.fence FROM sidings.executor e, sidings.origin o "
            "WHERE e.id = $1 AND o.origin = $2 AND o.owner = e.id AND o.epoch = $3",
            me,
            ORIGIN,
            epoch,
        )
        if standing is None:
            return
        waiting = await connection.fetch(
            "SELECT id, attempt FROM sidings.job WHERE origin = $1 ORDER BY position", ORIGIN
        )
        self.seen[epoch] = {row["id"] for row in waiting}
        for number in count(standing["cycle"] + 1):
            if number > standing["cycle"] + random.randrange(2, 8):  # a zombie, as often as not
                return
            batch = random.sample(waiting, min(5, len(waiting)))
            ids = [row["id"] for row in batch]
            row = await connection.fetchrow(
                self.cycle, me, number, standing["fence"], array(ids), array(ids), array(r["attempt"] for r in batch),
                "{}", array([0] * len(ids)), array([0] * len(ids)), "[]", [], epoch, None,
            )  # fmt: skip
            assert row is not None
            self.count["cycles" if row["applied"] else "void"] += 1
            self.count["ended"] += row["succeeded"]
            if not row["applied"]:
                return

    def superseded(self, history: list[asyncpg.Record]) -> list[int]:
        """Jobs that were ended by an epoch although a later one had found them waiting."""
        return [
            row["job_id"]
            for row in history
            if row["outcome"] == "succeeded"
            and any(row["job_id"] in self.seen.get(epoch, ()) for epoch in range(row["epoch"] + 1, row["epoch"] + 40))
        ]


@asynccontextmanager
async def an_owner_and_a_successor(dsn: str) -> AsyncIterator[tuple[asyncpg.Connection, asyncpg.Connection, list[int]]]:
    """Connections of two executors; the first has leased the origin for a moment, and its row names the first of two
    jobs."""
    async with connected(dsn) as owner, connected(dsn) as successor:
        for number, connection in enumerate((owner, successor)):
            await connection.execute("INSERT INTO sidings.executor (id) VALUES ($1)", UUID(int=number))
        insert = "INSERT INTO sidings.job (type, origin, payload) VALUES ('step', $1, '{}') RETURNING id"
        jobs = [await owner.fetchval(insert, ORIGIN) for _ in range(2)]
        assert await owner.fetchval(ACQUIRE, UUID(int=0)) == 1
        assert await cycle(owner, 1, running=jobs[:1]) == 1
        yield owner, successor, jobs


async def cycle(owner: asyncpg.Connection, number: int, *, running: list[int], ended: list[int] | None = None) -> int:
    """Whether it applies: 1 or 0."""
    ids = array(ended or [])
    zeros = array(0 for _ in ended or [])
    row = await owner.fetchrow(
        CYCLE, UUID(int=0), number, 0, array(running), ids, "{}", "{}", zeros, zeros, "[]", [], 1, None
    )
    assert row is not None
    return row["applied"]


async def take_over(successor: asyncpg.Connection) -> int:
    """The epoch, as soon as the lease has run out."""
    async with asyncio.timeout(20):
        while (epoch := await successor.fetchval(ACQUIRE, UUID(int=1))) is None:
            await asyncio.sleep(0.01)
    return epoch


async def test_after_a_takeover_the_former_owners_cycles_are_void(database: str):
    async with an_owner_and_a_successor(database) as (owner, successor, jobs):
        assert await take_over(successor) == 2
        assert await cycle(owner, 2, running=jobs[1:], ended=jobs[:1]) == 0
        rows = await owner.fetch("SELECT attempt, losses FROM sidings.job ORDER BY id")
        assert [tuple(row) for row in rows] == [(2, 1), (1, 0)]
        assert await owner.fetchval("SELECT running FROM sidings.executor WHERE cycle = 1") == []


@pytest.mark.parametrize("epoch", [1, 2], ids=["its own epoch", "the successor's epoch"])
async def test_after_a_takeover_the_former_owner_neither_renews_nor_releases_nor_promotes(database: str, epoch: int):
    """Nor under an epoch of the same number: after a failover that has lost commits, two owners may have it."""
    async with an_owner_and_a_successor(database) as (owner, successor, _):
        assert await take_over(successor) == 2
        await owner.execute("UPDATE sidings.job SET position = NULL, run_at = now()")
        leased = await owner.fetchval("SELECT lease_until FROM sidings.origin")
        [renewed] = await owner.fetch(RENEW, UUID(int=0), [ORIGIN], f"{{{epoch}}}", timedelta(minutes=1))
        assert (renewed["renewed"], renewed["held"]) == (False, False)
        assert await owner.fetch(RELEASE, UUID(int=0), [ORIGIN], [epoch]) == []
        assert await successor.fetch(RELEASE, UUID(int=1), [ORIGIN], [1]) == []  # of a lease that it had before
        assert await owner.fetchval("SELECT lease_until FROM sidings.origin") == leased
        [promoted] = await owner.fetch(PROMOTE, UUID(int=0), [ORIGIN], [epoch], 10, [], None, None)
        assert promoted["promoted"] == 0


# Of whoever holds an origin: what follows the executor, origins and epochs.
STATEMENTS: dict[str, tuple[object, ...]] = {
    "promote": (10, [], None, None),
    "supersede": (["a"], ["latest"], [], 10),
    "renumber": (2**62, 10),
    "fire_origins": ([SINCE], [None], [SINCE], True, [ORIGIN], ["{}"]),
}


async def do(statement: str, connection: asyncpg.Connection, executor: int, epoch: int) -> None:
    whose = ("sweep", "daily") if statement == "fire_origins" else ()
    query = load_sql("sidings.executor", statement)
    await connection.fetch(query, UUID(int=executor), *whose, [ORIGIN], [epoch], *STATEMENTS[statement])


async def give_work(connection: asyncpg.Connection) -> None:
    """Something for each of these statements: a job that is due, one that a newer one has followed, one beyond the
    sequence of positions, and a tick."""
    await connection.execute(
        f"""INSERT INTO sidings.job (type, origin, "group", policy, payload, position, run_at) VALUES
                ('step', '{ORIGIN}', NULL, 0, '{{}}', NULL, now()),
                ('latest', '{ORIGIN}', 'a', 1, '{{}}', nextval('sidings.job_position'), NULL),
                ('latest', '{ORIGIN}', 'a', 1, '{{}}', nextval('sidings.job_position'), NULL),
                ('step', '{ORIGIN}', NULL, 0, '{{}}', 2::numeric ^ 62 + 1, NULL)"""
    )
    await connection.execute(
        "INSERT INTO sidings.periodic (name, origin, schedule, since) VALUES ('sweep', $1, 'daily', $2)", ORIGIN, SINCE
    )


async def state(connection: asyncpg.Connection) -> list[list[asyncpg.Record]]:
    tables = ("job", "job_history", "periodic")
    return [await connection.fetch(f"SELECT * FROM sidings.{table} ORDER BY 1, 2") for table in tables]


@pytest.mark.parametrize("epoch", [1, 2], ids=["its own epoch", "the successor's epoch"])
@pytest.mark.parametrize("statement", STATEMENTS)
async def test_after_a_takeover_the_former_owner_changes_nothing_of_what_waits(
    database: str, statement: str, epoch: int
):
    """What it takes for superseded may run by now, and what it gives another place its successor has read."""
    async with an_owner_and_a_successor(database) as (owner, successor, _):
        await give_work(owner)
        assert await take_over(successor) == 2
        before = await state(owner)
        await do(statement, owner, 0, epoch)
        assert await state(owner) == before
        await do(statement, successor, 1, 1)  # nor does it itself, under the epoch of an owner before it
        assert await state(owner) == before
        await do(statement, successor, 1, 2)
        assert await state(owner) != before


@pytest.mark.parametrize("statement", STATEMENTS)
async def test_an_origin_is_not_taken_over_while_its_owner_changes_what_waits(database: str, statement: str):
    """Whoever looks at the lease without a lock may have seen that of a moment ago."""
    async with an_owner_and_a_successor(database) as (owner, successor, _):
        await give_work(owner)
        async with owner.transaction():
            await do(statement, owner, 0, 1)
            over = "SELECT lease_until < clock_timestamp() FROM sidings.origin"
            await eventually(lambda: successor.fetchval(over), "the lease has run out")
            assert await successor.fetchval(ACQUIRE, UUID(int=1)) is None
        assert await take_over(successor) == 2


RELAYS = {  # what follows the relay, slots, origins and epochs: the first message was sent, the second one refused
    "record": ([1], [1], "{1}", [3], [2], ["too large"], "00000001"),
    "park_topic": ("etas", "no such topic", 10, [], [0], 1_000),
}
ACQUIRE_SLOT = ACQUIRE.replace(ORIGIN, "outbox/3")


async def relay(statement: str, connection: asyncpg.Connection, number: int, epoch: int) -> None:
    query = load_sql("sidings.kafka.outbox", statement)
    await connection.fetch(query, UUID(int=number), [3], ["outbox/3"], [epoch], *RELAYS[statement])


@asynccontextmanager
async def two_relays(dsn: str) -> AsyncIterator[tuple[asyncpg.Connection, asyncpg.Connection]]:
    """Connections of two; the first has leased the slot for a moment, in which two messages wait."""
    async with connected(dsn) as owner, connected(dsn) as successor:
        await owner.execute("INSERT INTO sidings.outbox (slot, topic, value) VALUES (3, 'etas', ''), (3, 'etas', '')")
        assert await owner.fetchval(ACQUIRE_SLOT, UUID(int=0)) == 1
        over = "SELECT lease_until < clock_timestamp() FROM sidings.origin"
        await eventually(lambda: successor.fetchval(over), "the lease has run out")
        yield owner, successor


async def messages(connection: asyncpg.Connection) -> list[int]:
    """How many wait, and how many are parked."""
    return [await connection.fetchval(f"SELECT count(*) FROM sidings.{table}") for table in ("outbox", "outbox_parked")]


@pytest.mark.parametrize("statement", RELAYS)
async def test_a_relay_changes_nothing_of_a_slot_that_was_taken_over(database: str, statement: str):
    """What it refuses its successor may have sent, and what it takes for sent may be another's attempt."""
    async with two_relays(database) as (owner, successor):
        await eventually(lambda: successor.fetchval(ACQUIRE_SLOT, UUID(int=1)), "the takeover")
        for connection, number, epoch in ((owner, 0, 1), (owner, 0, 2), (successor, 1, 1)):
            await relay(statement, connection, number, epoch)
            assert await messages(owner) == [2, 0]
        await relay(statement, successor, 1, 2)
        assert await messages(owner) == ([0, 1] if statement == "record" else [0, 2])


@pytest.mark.parametrize("statement", RELAYS)
async def test_a_slot_is_not_taken_over_while_its_relay_records_what_it_has_sent(database: str, statement: str):
    async with two_relays(database) as (owner, successor):
        async with owner.transaction():
            await relay(statement, owner, 0, 1)
            assert await successor.fetchval(ACQUIRE_SLOT, UUID(int=1)) is None
        await eventually(lambda: successor.fetchval(ACQUIRE_SLOT, UUID(int=1)), "the takeover")


FINISH = f"SELECT sidings.finish($1, '{ORIGIN}', $2, $3, $4, 0, true)"


async def test_after_a_takeover_the_former_owners_transactional_handler_commits_nothing(database: str):
    async with an_owner_and_a_successor(database) as (owner, successor, jobs):
        assert await take_over(successor) == 2
        before = await state(owner)
        superseded = ((0, 1, 2, "SD001"), (0, 2, 2, "SD001"), (1, 1, 2, "SD001"))
        for number, epoch, attempt, code in (*superseded, (1, 2, 1, "SD002")):
            with pytest.raises(asyncpg.PostgresError) as refused:
                await owner.execute(FINISH, UUID(int=number), epoch, jobs[0], attempt)
            assert refused.value.sqlstate == code
            assert await state(owner) == before
        await owner.execute(FINISH, UUID(int=1), 2, jobs[0], 2)
        assert await owner.fetchval("SELECT count(*) FROM sidings.job") == 1


async def test_an_origin_is_not_taken_over_while_a_transactional_handler_commits(database: str):
    async with an_owner_and_a_successor(database) as (owner, successor, jobs):
        async with owner.transaction():
            await owner.execute(FINISH, UUID(int=0), 1, jobs[0], 1)
            over = "SELECT lease_until < clock_timestamp() FROM sidings.origin"
            await eventually(lambda: successor.fetchval(over), "the lease has run out")
            assert await successor.fetchval(ACQUIRE, UUID(int=1)) is None
        assert await take_over(successor) == 2


async def test_a_lease_that_somebody_has_locked_keeps_no_other_from_being_renewed(database: str):
    """As whoever acts on its jobs does. With the others, all that runs would be given up."""
    both = [ORIGIN, "t/1"]
    async with connected(database, lock_timeout="1s") as owner, connected(database) as somebody:
        await owner.execute("INSERT INTO sidings.executor (id) VALUES ($1)", UUID(int=0))
        await owner.execute("SELECT sidings.acquire($1, $2, 1, '1 hour', true)", UUID(int=0), both)
        async with somebody.transaction():
            await somebody.execute("SELECT FROM sidings.origin WHERE origin = $1 FOR UPDATE", ORIGIN)
            rows = await owner.fetch(RENEW, UUID(int=0), both, "{1, 1}", timedelta(hours=1))
    assert {(row["origin"], row["renewed"], row["held"]) for row in rows} == {
        (ORIGIN, False, True),
        ("t/1", True, True),
    }


async def test_of_two_that_want_an_origin_its_holder_hears_of_the_newer_generation(database: str):
    """An older one asks again and again, as it does while its assignment stands: it neither keeps the newer one from
    being heard, nor takes its place. Whoever asks no more is not heard either: it would be yielded to a dead one, and
    nobody would have it."""
    async with connected(database) as connection:
        for number in range(3):
            await connection.execute("INSERT INTO sidings.executor (id) VALUES ($1)", UUID(int=number))
        wish = f"SELECT acquired_epoch FROM sidings.acquire($1, '{{{ORIGIN}}}', $2, '1 hour', true)"
        assert await connection.fetchval(wish, UUID(int=0), 5) == 1
        assert await connection.fetchval(wish.replace("1 hour", "1 millisecond"), UUID(int=1), 8) is None
        over = "SELECT wanted_until < clock_timestamp() FROM sidings.origin"
        await eventually(lambda: connection.fetchval(over), "the wish has run out")
        [renewed] = await connection.fetch(RENEW, UUID(int=0), [ORIGIN], "{1}", timedelta(hours=1))
        assert (renewed["renewed"], renewed["wanted_generation"]) == (True, None)
        for number, generation, heard in ((1, 6, 6), (2, 7, 7), (1, 6, 7)):
            assert await connection.fetchval(wish, UUID(int=number), generation) is None
            [renewed] = await connection.fetch(RENEW, UUID(int=0), [ORIGIN], "{1}", timedelta(hours=1))
            assert renewed["wanted_generation"] == heard


async def test_a_lease_that_its_owner_has_taken_anew_is_neither_renewed_nor_given_back_under_the_former_epoch(
    database: str,
):
    """As where the first asking arrives behind its repetition. With that one no delayed job would be promoted."""
    async with an_owner_and_a_successor(database) as (owner, _, _):
        assert await owner.fetchval(ACQUIRE, UUID(int=0)) == 2
        [renewed] = await owner.fetch(RENEW, UUID(int=0), [ORIGIN], "{1}", timedelta(minutes=1))
        assert (renewed["renewed"], renewed["held"]) == (False, False)
        assert await owner.fetch(RELEASE, UUID(int=0), [ORIGIN], [1]) == []
        assert await owner.fetch(RELEASE, UUID(int=0), [ORIGIN], [2]) == [(ORIGIN,)]


async def test_a_release_that_waits_for_a_takeover_leaves_the_successor_its_lease(database: str):
    """Its snapshot is of before; the successor's jobs would run without a lease, and begin elsewhere as well."""
    async with an_owner_and_a_successor(database) as (owner, successor, _), connected(database) as observer:
        over = "SELECT lease_until < clock_timestamp() FROM sidings.origin"
        await eventually(lambda: successor.fetchval(over), "the lease has run out")
        async with successor.transaction():
            assert await successor.fetchval(ACQUIRE, UUID(int=1)) == 2
            releasing = asyncio.create_task(owner.fetch(RELEASE, UUID(int=0), [ORIGIN], [1]))
            blocked = "SELECT pg_blocking_pids($1) = ARRAY[$2::int]"
            pids = owner.get_server_pid(), successor.get_server_pid()
            await eventually(lambda: observer.fetchval(blocked, *pids), "the release waits")
        assert await releasing == []
        assert tuple(await owner.fetchrow("SELECT owner, epoch FROM sidings.origin") or ()) == (UUID(int=1), 2)


@pytest.mark.parametrize("action", ["succeeded", "end", "again", "block", "hold"])
async def test_the_outcome_of_an_attempt_that_is_over_ends_nothing_also_where_the_fence_lets_it_through(
    database: str, action: str
):
    """The second guard, should the first one have a hole: whoever accounts for an attempt begins another one."""
    async with an_owner_and_a_successor(database) as (owner, _, jobs):
        await owner.execute("UPDATE sidings.job SET attempt = attempt + 1")
        before = await owner.fetch("SELECT * FROM sidings.job ORDER BY id")
        ended = array(jobs[:1] if action == "succeeded" else [])
        times = array([0] if action == "succeeded" else [])
        outcome = {"id": jobs[0], "attempt": 1, "epoch": 1, "action": action, "outcome": "retried", "failed": 1,
                   "delay": 0, "started": 0, "finished": 0, "reason": "none"}  # fmt: skip
        others = json.dumps([] if action == "succeeded" else [outcome])
        row = await owner.fetchrow(CYCLE, UUID(int=0), 2, 0, "{}", ended, "{}", "{}", times, times, others, [], 1, None)
        assert row is not None
        assert tuple(row) == (1, 0, 0)
        assert await owner.fetch("SELECT * FROM sidings.job ORDER BY id") == before


async def test_a_takeover_waits_for_the_cycle_at_work_and_accounts_for_what_that_one_names(database: str):
    async with an_owner_and_a_successor(database) as (owner, successor, jobs), connected(database) as observer:
        async with owner.transaction():
            assert await cycle(owner, 2, running=jobs[1:], ended=jobs[:1]) == 1
            taking_over = asyncio.create_task(take_over(successor))
            blocked = "SELECT pg_blocking_pids($1) = ARRAY[$2::int]"
            pids = successor.get_server_pid(), owner.get_server_pid()
            await eventually(lambda: observer.fetchval(blocked, *pids), "the takeover waits")
        assert await taking_over == 2
        rows = await observer.fetch("SELECT job_id, outcome::text FROM sidings.job_history ORDER BY job_id")
        assert [tuple(row) for row in rows] == [(jobs[0], "succeeded"), (jobs[1], "lost")]


async def test_a_takeover_accounts_for_what_ran_in_that_origin_alone(database: str):
    """What the dead one ran in others is accounted for by whoever takes those over. Its own lease nobody takes over."""
    acquire = "SELECT * FROM sidings.acquire($1, $2, 5, '1 millisecond', true)"
    dead, heir = UUID(int=0), UUID(int=1)
    async with connected(database) as connection:
        await connection.execute("INSERT INTO sidings.executor (id) VALUES ($1), ($2)", dead, heir)
        await connection.execute(
            "INSERT INTO sidings.origin "
            "(origin, owner, epoch, lease_until, wanted_by, wanted_until, wanted_generation) "
            "SELECT 't/' || n, $1, 3, '-infinity', $2, 'infinity', 4 FROM generate_series(0, 1) n",
            *(dead, heir),
        )
        jobs = await connection.fetch(
            "INSERT INTO sidings.job (type, origin, payload) SELECT 'step', 't/' || n % 2, '{}' "
            "FROM generate_series(0, 3) n RETURNING id"
        )
        here, there, waiting, _ = [row["id"] for row in jobs]
        gone = waiting + 1_000
        await connection.execute("UPDATE sidings.executor SET running = $2 WHERE id = $1", dead, [here, there, gone])
        taken = await connection.fetch(acquire, heir, ["t/0"])
        assert [tuple(row) for row in taken] == [("t/0", 4, 1, dead)]
        rows = await connection.fetch("SELECT attempt, losses FROM sidings.job ORDER BY id")
        assert [tuple(row) for row in rows] == [(2, 1), (1, 0), (1, 0), (1, 0)]
        history = "SELECT job_id, epoch, attempt, outcome::text, executor FROM sidings.job_history"
        assert [tuple(row) for row in await connection.fetch(history)] == [(here, 3, 1, "lost", dead)]
        of_the_dead = "SELECT fence, running FROM sidings.executor WHERE id = $1"
        assert tuple(await connection.fetchrow(of_the_dead, dead) or ()) == (1, [there, gone])
        wanted = "SELECT wanted_by, wanted_until, wanted_generation FROM sidings.origin ORDER BY origin"
        assert tuple((await connection.fetch(wanted))[0]) == (None, None, None)

        await connection.execute("UPDATE sidings.executor SET running = $2 WHERE id = $1", heir, [waiting])
        await connection.execute("UPDATE sidings.origin SET lease_until = 'infinity'")
        taken = await connection.fetch(acquire, heir, ["t/0"])
        assert [tuple(row) for row in taken] == [("t/0", 5, 0, heir)]
        assert tuple(await connection.fetchrow(of_the_dead, heir) or ()) == (0, [waiting])
        assert len(await connection.fetch(history)) == 1


async def test_a_wish_gives_way_to_a_newer_generation_only_until_it_has_run_out(database: str):
    acquire = "SELECT * FROM sidings.acquire($1, '{t/0}', $2, '1 minute', true)"
    former, me = UUID(int=1), UUID(int=2)
    async with connected(database) as connection:
        await connection.execute(
            "INSERT INTO sidings.origin (origin, owner, epoch, lease_until) VALUES ('t/0', $1, 1, 'infinity')",
            UUID(int=0),
        )
        for until, generation, wanted_by in (
            ("infinity", 4, former),
            ("infinity", 5, former),
            ("infinity", 6, me),
            ("-infinity", 4, me),
        ):
            await connection.execute(
                "UPDATE sidings.origin SET wanted_by = $1, wanted_until = $2::text::timestamptz, wanted_generation = 5",
                *(former, until),
            )
            assert await connection.fetch(acquire, me, generation) == []
            wish = await connection.fetchrow("SELECT wanted_by, wanted_generation FROM sidings.origin")
            assert tuple(wish or ()) == (wanted_by, generation if wanted_by == me else 5)


async def test_a_wish_is_prolonged_by_who_has_it_when_half_of_its_time_is_over_and_written_no_sooner(database: str):
    """Who waits asks again and again, for as long as it lives. What it finds as it should be it does not even lock."""
    holder, me, other = UUID(int=0), UUID(int=1), UUID(int=2)
    row = "SELECT ctid, xmin, xmax, wanted_by, wanted_until > now() + interval '59 minutes' FROM sidings.origin"
    async with connected(database) as connection:
        await connection.execute(
            "INSERT INTO sidings.origin (origin, owner, epoch, lease_until) VALUES ('t/0', $1, 1, 'infinity')", holder
        )
        acquire = "SELECT * FROM sidings.acquire($1, '{t/0}', $2, '1 hour', true)"
        shorten = "UPDATE sidings.origin SET wanted_until = clock_timestamp() + $1::text::interval"
        for left, asks, generation, prolonged in (
            ("31 minutes", me, 5, False),
            ("31 minutes", other, 5, False),
            ("29 minutes", other, 5, False),
            ("29 minutes", me, 4, False),
            ("29 minutes", me, 5, True),
            ("31 minutes", me, 6, True),
        ):
            await connection.execute("UPDATE sidings.origin SET wanted_by = $1, wanted_generation = 5", me)
            await connection.execute(shorten, left)
            before = await connection.fetchrow(row)
            assert await connection.fetch(acquire, asks, generation) == []
            after = await connection.fetchrow(row)
            assert (after == before) is not prolonged
            assert after is not None
            assert tuple(after)[3:] == (me, prolonged)


async def test_no_superseded_epoch_ends_a_job(database: str):
    stress = Stress(database)
    history = await stress.run(takeovers=80)
    assert stress.superseded(history) == []
    assert len({row["job_id"] for row in history if row["outcome"] == "succeeded"}) == stress.count["ended"]
    # It has been a fight: takeovers found cycles under way, and voided them.
    assert stress.count["void"] > 10
    assert stress.count["ended"] > 100


async def test_without_the_fence_this_stress_would_notice(database: str):
    connection = await asyncpg.connect(database)
    begin = await connection.fetchval("SELECT pg_get_functiondef('sidings.begin_cycle'::regproc)")
    assert FENCE in begin
    await connection.execute(begin.replace(FENCE, ""))
    await connection.close()
    stress = Stress(database)
    found = stress.superseded(await stress.run(takeovers=80))
    assert found != []
