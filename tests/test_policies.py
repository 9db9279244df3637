"""Policies `latest` and `parallel`, unique keys, handlers that take lists, groups that wait for a person."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from typing import Any

import asyncpg
import pytest
from prometheus_client import CollectorRegistry
from pydantic import field_validator
from sidings.errors import ConfigurationError, EnqueueError
from sidings.executor import reader
from sidings.executor.clock import now
from sidings.jobs import Discard, Job, JobId, OutcomeName, Registry, Retry, Snooze
from sidings.schema import load_sql
from tenacity import retry_if_result, stop_after_attempt, wait_fixed, wait_none

from .support import (
    ORIGIN,
    Ledger,
    Ride,
    connected,
    drained,
    enqueue,
    eventually,
    fetch,
    history,
    jobs_left,
    lose,
    outcomes,
    running,
    stuck_lanes,
    value,
    without_place,
)

NEVER = 3_600.0


async def ended(database: str) -> dict[int, str]:
    """The terminal outcome of each job."""
    rows = await history(database, "job_id, outcome")
    final = [(row["job_id"], row["outcome"]) for row in rows if row["outcome"] not in ("retried", "snoozed", "held")]
    assert len(dict(final)) == len(final), "a job ended twice"
    return dict(final)


async def has_ended(database: str, count: int) -> bool:
    return len(await ended(database)) == count


# -- latest ---------------------------------------------------------------------------------------------------------


async def test_of_the_waiting_jobs_of_a_latest_type_only_the_newest_runs(database: str):
    registry = Registry()
    seen: list[int] = []
    started, go_on = asyncio.Event(), asyncio.Event()

    @registry.job(group="transport", policy="latest")
    async def locate(job: Job[Ride]) -> None:
        seen.append(job.payload.number)
        started.set()
        await go_on.wait()

    async with running(database, registry, concurrency=2) as executor:
        [head] = await enqueue(database, locate, [Ride(transport="a", number=0)])
        await started.wait()  # what runs is not superseded
        ids = await enqueue(database, locate, [Ride(transport="a", number=n) for n in range(1, 301)])
        [other] = await enqueue(database, locate, [Ride(transport="b", number=1_000)])
        await eventually(lambda: 1_000 in seen)
        go_on.set()
        await drained(database)
        assert seen == [0, 1_000, 300]
        assert executor.metrics.count(OutcomeName.SUPERSEDED, "locate") == 299
    assert await ended(database) == {
        head: "succeeded",
        other: "succeeded",
        ids[-1]: "succeeded",
        **dict.fromkeys(ids[:-1], "superseded"),
    }


async def test_more_jobs_than_one_statement_ends_are_superseded_by_several(database: str):
    registry = Registry()
    seen: list[int] = []

    @registry.job(group="transport", policy="latest", history=False)
    async def locate(job: Job[Ride]) -> None:
        seen.append(job.payload.number)

    await enqueue(database, locate, [Ride(transport="a", number=n) for n in range(20_500)])
    async with running(database, registry):
        await drained(database)
    assert seen == [20_499]


async def test_a_latest_job_that_commits_late_is_not_lost_and_supersedes_nothing_newer(database: str):
    registry = Registry()
    seen: list[int] = []
    go_on = asyncio.Event()

    @registry.job(group="transport", policy="latest")
    async def locate(job: Job[Ride]) -> None:
        seen.append(job.payload.number)
        if job.payload.number == 0:
            await go_on.wait()

    async with connected(database) as late, running(database, registry) as executor:
        transaction = late.transaction()
        await transaction.start()
        [first] = await locate.enqueue_many(late, [Ride(transport="a", number=1)], origin=ORIGIN)  # not yet committed
        [head] = await enqueue(database, locate, [Ride(transport="a", number=0)])
        await eventually(lambda: seen == [0])
        await transaction.commit()
        [newest] = await enqueue(database, locate, [Ride(transport="a", number=2)])
        await eventually(lambda: executor.scheduler.knows(first) and executor.scheduler.knows(newest))
        go_on.set()
        await drained(database)
    assert seen == [0, 2]
    assert await ended(database) == {head: "succeeded", first: "superseded", newest: "succeeded"}


async def test_only_what_waits_is_superseded_and_only_by_what_waits(database: str):
    """Not what a person holds back, nor what is delayed or was enqueued under another policy; and none of these
    supersedes anything. The newest inherits how long those before it back off, also where that is for ever."""
    columns = "type, policy, held, position, run_at, failures, error"
    next_position = "nextval('sidings.job_position')"
    left = [
        "'locate', 1, 'a person', NULL, NULL, 0, NULL",
        "'locate', 1, NULL, NULL, now() + interval '1 hour', 0, NULL",
        f"'locate', 0, NULL, {next_position}, NULL, 0, NULL",
        f"'locate', 2, NULL, {next_position}, NULL, 0, NULL",
        f"'others', 1, NULL, {next_position}, NULL, 0, NULL",
    ]
    older = [
        f"'locate', 1, NULL, {next_position}, NULL, 0, NULL",
        f"'locate', 1, NULL, {next_position}, 'infinity', 3, 'no map'",
    ]
    newest = f"'locate', 1, NULL, {next_position}, NULL, 0, NULL"
    async with connected(database) as connection:
        ids = [
            await connection.fetchval(
                f"""INSERT INTO sidings.job (origin, "group", payload, {columns})
                    VALUES ('{ORIGIN}', 'a', '{{}}', {values}) RETURNING id"""
            )
            for values in (*left, *older, newest, *left)
        ]
        me = await connection.fetchval("INSERT INTO sidings.executor (id) VALUES (gen_random_uuid()) RETURNING id")
        epoch = await connection.fetchval(
            f"SELECT acquired_epoch FROM sidings.acquire($1, '{{{ORIGIN}}}', 1, '1 hour', true)", me
        )
        rows = await connection.fetch(
            load_sql("sidings.executor", "supersede"), me, [ORIGIN], [epoch], ["a"], ["locate"], [], 100
        )
        assert [tuple(row) for row in rows] == [(1, ids[7], 2)]
        stand = [row["id"] for row in await connection.fetch("SELECT id FROM sidings.job ORDER BY id")]
        assert stand == [id for id in ids if id not in ids[5:7]]
        inherited = await connection.fetchrow(
            "SELECT run_at = 'infinity' AS blocked, failures, error FROM sidings.job WHERE id = $1", ids[7]
        )
        assert tuple(inherited) == (True, 3, "no map")


@pytest.mark.parametrize(
    ("policy", "newer"),
    [
        (1, f"'locate', '{ORIGIN}', 'a', 1, 'a person'"),
        (1, f"'others', '{ORIGIN}', 'a', 1, NULL"),
        (1, f"'locate', '{ORIGIN}', 'b', 1, NULL"),
        (1, "'locate', 'transports/1', 'a', 1, NULL"),
        (1, f"'locate', '{ORIGIN}', 'a', 0, NULL"),
        (0, f"'locate', '{ORIGIN}', 'a', 1, NULL"),
    ],
    ids=["a held one", "another type", "another group", "another origin", "another policy", "before it was latest"],
)
async def test_a_delayed_job_that_is_due_is_superseded_by_nothing_else(database: str, policy: int, newer: str):
    """It would have ended although nothing runs in its place."""
    async with connected(database) as connection:
        insert = """INSERT INTO sidings.job (type, origin, "group", policy, held, position, run_at, payload)
                    VALUES ({}, NULL, {}, '{{}}') RETURNING id"""
        due = await connection.fetchval(insert.format(f"'locate', '{ORIGIN}', 'a', {policy}, NULL", "now()"))
        await connection.execute(insert.format(newer, "now() + interval '1 hour'"))
        me = await connection.fetchval("INSERT INTO sidings.executor (id) VALUES (gen_random_uuid()) RETURNING id")
        epoch = await connection.fetchval(
            f"SELECT acquired_epoch FROM sidings.acquire($1, '{{{ORIGIN}}}', 1, '1 hour', true)", me
        )
        await connection.fetchrow(load_sql("sidings.executor", "promote"), me, [ORIGIN], [epoch], 8, [], None, None)
        assert await connection.fetchval("SELECT position FROM sidings.job WHERE id = $1", due) is not None


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([(1, 2, 1, 2, "old"), (2, 5, 2, 1, "new")], (5, 2, 2, 1, "new")),
        ([(3, 1, 0, 2, "a"), (2, 4, 0, 1, "b"), (9, 0, 0, 0, None), (None, 0, 0, None, None)], (4, 0, 3, 1, "b")),
        ([(3, 2, 3, 1, "old"), (2, 1, 1, 4, "new")], (2, 3, 3, 1, "new")),
        ([(9, 0, 3, 1, "snoozed"), (2, 0, 1, 4, None)], (0, 3, 2, 4, None)),
    ],
    ids=["its own", "those of several", "either", "losses alone"],
)
async def test_the_newest_job_has_the_most_failures_and_losses_the_first_start_and_the_last_due_time(
    database: str, jobs: list[tuple[int | None, int, int, int | None, str | None]], expected: tuple[object, ...]
):
    """Also where an older one, which had failed, has been released behind it, or was committed late. It has nothing of
    those that have not failed, as snoozed ones, but their losses."""
    async with connected(database) as connection:
        for run_at, failures, losses, started, error in jobs:
            await connection.execute(
                """INSERT INTO sidings.job
                       (type, origin, "group", policy, payload, run_at, failures, losses, first_started_at, error)
                   VALUES ('locate', $1, 'a', 1, '{}', to_timestamp($2::int), $3, $4, to_timestamp($5::int), $6)""",
                *(ORIGIN, run_at, failures, losses, started, error),
            )
        me = await connection.fetchval("INSERT INTO sidings.executor (id) VALUES (gen_random_uuid()) RETURNING id")
        epoch = await connection.fetchval(
            f"SELECT acquired_epoch FROM sidings.acquire($1, '{{{ORIGIN}}}', 1, '1 hour', true)", me
        )
        supersede = load_sql("sidings.executor", "supersede")
        await connection.fetch(supersede, me, [ORIGIN], [epoch], ["a"], ["locate"], ["locate"], 100)
        [left] = await connection.fetch(
            """SELECT failures, losses, date_part('epoch', run_at), date_part('epoch', first_started_at), error
               FROM sidings.job"""
        )
        assert tuple(left) == expected
        assert await ended(database) == {}  # its type leaves no history


@pytest.mark.parametrize("payload", ['{"number": 1}', None])
@pytest.mark.parametrize("statement", ["supersede", "promote"])
async def test_the_history_tells_of_a_superseded_job_all_that_it_had(
    database: str, statement: str, payload: str | None
):
    """Reports reckon with it, and out of it a person has the job run after all. NULL are the payloads of jobs that
    cannot: a job that SQL has stored without one has null."""
    arguments = (["a"], ["locate"], [], 100) if statement == "supersede" else (100, [], None, None)
    place = "nextval('sidings.job_position')" if statement == "supersede" else "NULL"
    async with connected(database) as connection:
        await connection.execute(
            f"""INSERT INTO sidings.job (type, origin, "group", policy, priority, attempt, enqueued_at, run_at, headers,
                                         payload, position)
                SELECT 'locate', '{ORIGIN}', 'a', 1, 7, 3, now() - interval '1 h', now() - interval '1 min',
                       '{{"correlation_id": "c"}}', $1::json, {place} FROM generate_series(1, 2)""",
            payload,
        )
        old = await connection.fetchrow(
            """SELECT id AS job_id, enqueued_at, run_at AS due_at, attempt, priority, type, origin, "group",
                      headers ->> 'correlation_id' AS correlation_id, coalesce(payload, 'null') AS payload
               FROM sidings.job ORDER BY id LIMIT 1"""
        )
        me = await connection.fetchval("INSERT INTO sidings.executor (id) VALUES (gen_random_uuid()) RETURNING id")
        epoch = await connection.fetchval(
            f"SELECT acquired_epoch FROM sidings.acquire($1, '{{{ORIGIN}}}', 1, '1 hour', true)", me
        )
        await connection.fetch(load_sql("sidings.executor", statement), me, [ORIGIN], [epoch], *arguments)
    [told] = await history(database)
    assert old is not None
    assert dict(old).items() <= dict(told).items()
    assert (told["executor"], told["epoch"], told["outcome"], told["started_at"]) == (me, epoch, "superseded", None)


async def test_a_superseded_job_that_somebody_has_locked_is_left_for_another_time(database: str):
    """All that is to be read would wait with it."""
    async with connected(database, lock_timeout="1s") as connection, connected(database) as person:
        insert = """INSERT INTO sidings.job (type, origin, "group", policy, payload)
                    VALUES ('locate', $1, 'a', 1, '{}') RETURNING id"""
        locked, _, newest = [await connection.fetchval(insert, ORIGIN) for _ in range(3)]
        me = await connection.fetchval("INSERT INTO sidings.executor (id) VALUES (gen_random_uuid()) RETURNING id")
        epoch = await connection.fetchval(
            f"SELECT acquired_epoch FROM sidings.acquire($1, '{{{ORIGIN}}}', 1, '1 hour', true)", me
        )
        supersede = load_sql("sidings.executor", "supersede")
        async with person.transaction():
            await person.execute("SELECT FROM sidings.job WHERE id = $1 FOR UPDATE", locked)
            [row] = await connection.fetch(supersede, me, [ORIGIN], [epoch], ["a"], ["locate"], [], 100)
            assert (row["id"], row["superseded"]) == (newest, 1)
        left = await connection.fetch("SELECT id FROM sidings.job ORDER BY id")
        assert [row["id"] for row in left] == [locked, newest]


async def test_other_types_of_the_group_keep_their_places_between_latest_jobs(database: str):
    registry = Registry()
    ledger = Ledger()

    @registry.job(group="transport", policy="latest")
    async def locate(job: Job[Ride]) -> None:
        ledger.start(job)
        ledger.end(job)

    @registry.job(group="transport")
    async def load(job: Job[Ride]) -> None:
        ledger.start(job)
        ledger.end(job)

    async with connected(database) as connection, connection.transaction():
        ids = [
            await job_type.enqueue(connection, Ride(transport="a"), origin=ORIGIN)
            for job_type in (locate, load, locate, load, locate, load)
        ]
    async with running(database, registry):
        await drained(database)
    assert ledger.overlaps == []
    assert [id for _, id in ledger.ended] == [ids[1], ids[3], ids[4], ids[5]]
    assert Counter((await ended(database)).values()) == {"succeeded": 4, "superseded": 2}


async def test_the_newest_job_inherits_the_failures_of_those_it_supersedes(database: str):
    registry = Registry()
    failures: list[tuple[int, int]] = []

    @registry.job(group="transport", policy="latest", retry=Retry(wait=wait_fixed(NEVER)))
    async def locate(job: Job[Ride]) -> None:
        failures.append((job.payload.number, job.failures))
        if job.payload.number < 2:
            raise OSError("the carrier is down")

    async with running(database, registry) as executor:
        for number in range(2):
            await enqueue(database, locate, [Ride(transport="a", number=number)])
            await eventually(lambda number=number: (number, number) in failures)
            await eventually(lambda: stuck_lanes(executor.scheduler))
            if not number:  # the next one waits behind the head that backs off; both are due now
                await enqueue(database, locate, [Ride(transport="a", number=1)])
                await fetch(database, "UPDATE sidings.job SET run_at = now() WHERE run_at IS NOT NULL")
                break
    async with running(database, registry):
        await eventually(lambda: (1, 1) in failures)
        await enqueue(database, locate, [Ride(transport="a", number=2)])
    await fetch(database, "UPDATE sidings.job SET run_at = now() WHERE run_at IS NOT NULL")
    async with running(database, registry):
        await drained(database)
    assert failures == [(0, 0), (1, 1), (2, 2)]
    assert Counter((await ended(database)).values()) == {"superseded": 2, "succeeded": 1}


async def test_the_newest_job_inherits_the_losses_of_those_it_supersedes(database: str):
    """Where newer ones kept coming, a handler that kills its process killed the next one each time, and was never found
    out: its job was superseded, and the newest had no losses."""
    registry = Registry()
    seen: list[str] = []

    @registry.job(group="transport", policy="latest")
    async def locate(job: Job[Ride]) -> None:
        seen.append(f"{job.group}-{job.payload.number}")

    for group, losses in [("suspect", 2), ("poison", 3)]:
        lost, _ = await enqueue(database, locate, [Ride(transport=group, number=number) for number in range(2)])
        await lose(database, [lost], losses)
    async with running(database, registry, poison_after=2):
        await eventually(partial(value, database, "SELECT count(held) = 1 AND count(*) = 1 FROM sidings.job"))
    assert seen == ["suspect-1"]
    [held] = await fetch(database, "SELECT held, payload FROM sidings.job")
    assert (held["held"], Ride.model_validate_json(held["payload"]).number) == ("poison: it kept killing executors", 1)
    assert sorted(await outcomes(database)) == ["held", "succeeded", "superseded", "superseded"]


async def test_a_delay_of_a_latest_type_debounces(database: str):
    registry = Registry()
    seen: list[int] = []

    @registry.job(group="transport", policy="latest")
    async def index(job: Job[Ride]) -> None:
        seen.append(job.payload.number)

    for number in range(3):
        await enqueue(database, index, [Ride(transport="a", number=number)], delay=NEVER + number)
    await enqueue(database, index, [Ride(transport="b", number=9)], delay=NEVER)
    # The first two have become due; the third, which is newer, has not.
    await fetch(
        database,
        "UPDATE sidings.job SET run_at = now() WHERE id <> (SELECT id FROM sidings.job ORDER BY id OFFSET 2 LIMIT 1)",
    )
    async with running(database, registry) as executor:
        await eventually(lambda: seen == [9])
        await eventually(partial(has_ended, database, 3))
        assert Counter((await ended(database)).values()) == {"superseded": 2, "succeeded": 1}
        await eventually(lambda: executor.metrics.count(OutcomeName.SUPERSEDED) == 2, "the metrics count them")
        await fetch(database, "UPDATE sidings.job SET run_at = now()")
        await drained(database)
    assert seen == [9, 2]


async def test_the_newest_job_that_somebody_has_locked_holds_up_no_other_group(database: str):
    """A person's transaction, say. To inherit the failures of those before it is an update of its row."""
    registry = Registry()
    seen: list[tuple[str, int]] = []
    started, go_on = asyncio.Event(), asyncio.Event()

    @registry.job(group="transport", policy="latest", retry=Retry(wait=wait_fixed(0.3)))
    async def locate(job: Job[Ride]) -> None:
        seen.append((job.payload.transport, job.payload.number))
        if job.payload.number == 0:
            started.set()
            await go_on.wait()
            raise ConnectionError("the map is away")

    async with connected(database) as person, running(database, registry) as executor:
        await enqueue(database, locate, [Ride(transport="a", number=0)])
        await started.wait()
        [newest] = await enqueue(database, locate, [Ride(transport="a", number=1)])
        async with person.transaction():
            await person.fetch("SELECT FROM sidings.job WHERE id = $1 FOR UPDATE", newest)
            go_on.set()
            await eventually(lambda: executor.metrics.count(OutcomeName.RETRIED) == 1, "it has failed")
            await eventually(lambda: ("a", 1) in seen, "the turn of its group has come")
            await enqueue(database, locate, [Ride(transport="b", number=n) for n in range(1, 4)])
            await eventually(lambda: ("b", 3) in seen, "the other group goes on", seconds=10)
        await drained(database)
    assert seen == [("a", 0), ("a", 1), ("b", 3)]


async def test_superseded_jobs_that_postgres_does_not_let_end_hold_up_their_own_group(
    database: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """As a trigger on the history, or a missing right, does not: it was tried some hundred times a second."""
    monkeypatch.setattr(reader, "_THIN_AGAIN_SECONDS", 0.2)
    registry = Registry()
    seen: list[str] = []
    tried: list[float] = []

    @registry.job(group="transport", policy="latest")
    async def locate(job: Job[Ride]) -> None:
        seen.append(f"{job.group}-{job.payload.number}")

    await fetch(
        database,
        """DO $$ BEGIN
           CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''not this one''; END';
           CREATE TRIGGER refuse BEFORE INSERT ON sidings.job_history FOR EACH ROW
               WHEN (NEW."group" = 'bad' AND NEW.outcome = 'superseded') EXECUTE FUNCTION refuse(); END $$""",
    )
    rides = [Ride(transport=group, number=number) for number in range(3) for group in ("bad", "good")]
    await enqueue(database, locate, rides)
    async with running(database, registry) as executor:
        thinning, told = executor.reader.thinning, "superseded jobs could not be ended"
        failed = thinning.failed
        monkeypatch.setattr(thinning, "failed", lambda error: (tried.append(now()), failed(error)))
        await eventually(lambda: seen == ["good-2"] and len(tried) >= 5, tried)
        thinning._since -= 60
        assert any("superseded jobs cannot be ended" in problem for problem in executor.problems())
        assert min(after - before for before, after in pairwise(tried)) >= 0.1
        assert caplog.text.count(told) == 1
        await fetch(database, "DROP TRIGGER refuse ON sidings.job_history")
        await drained(database)
    assert seen == ["good-2", "bad-2"]
    assert Counter((await ended(database)).values()) == {"superseded": 4, "succeeded": 2}


async def test_neither_health_nor_the_log_shows_the_row_that_postgres_refuses(
    database: str, caplog: pytest.LogCaptureFixture
):
    """It quotes its columns. A group with a line break in it had a line of the log for itself."""
    registry = Registry()

    @registry.job(group="transport", policy="latest")
    async def locate(job: Job[Ride]) -> None: ...

    await fetch(database, "ALTER TABLE sidings.job_history ADD CONSTRAINT none CHECK (outcome <> 'superseded')")
    await enqueue(database, locate, [Ride(transport="4111-secret\nCRITICAL x", number=number) for number in range(2)])
    async with running(database, registry) as executor:
        thinning = executor.reader.thinning
        await eventually(lambda: thinning.seconds() > 0, "it is refused")
        thinning._since -= 60
        [problem] = executor.problems()
        for told in (problem, caplog.text):
            assert 'violates check constraint "none"' in told
            assert "4111-secret" not in told
            assert "CRITICAL" not in told
        await fetch(database, "ALTER TABLE sidings.job_history DROP CONSTRAINT none")


async def test_a_delayed_job_that_somebody_has_locked_holds_up_no_others(database: str):
    registry = Registry()
    seen: list[int] = []

    @registry.job()
    async def locate(job: Job[Ride]) -> None:
        seen.append(job.payload.number)

    @registry.job(group="transport", policy="latest")
    async def newest(job: Job[Ride]) -> None:
        seen.append(job.payload.number)

    async with connected(database) as person, AsyncExitStack() as stack:
        async with person.transaction():
            [locked] = await enqueue(database, locate, [Ride(number=1)], delay=0.2)
            [followed] = await enqueue(database, newest, [Ride(transport="a", number=2)], delay=0.2)
            await person.fetch("SELECT FROM sidings.job WHERE id = ANY ($1) FOR UPDATE", [locked, followed])
            await enqueue(database, newest, [Ride(transport="b", number=3)], delay=0.2)
            await enqueue(database, locate, [Ride(number=4)], delay=0.2)
            await stack.enter_async_context(running(database, registry))
            await eventually(lambda: {3, 4} <= {*seen}, "the others run", seconds=10)
        await eventually(lambda: {1, 2} <= {*seen}, "they run as well")


@pytest.mark.parametrize("policy", ["serial", "latest"])
async def test_a_delayed_job_that_somebody_has_locked_keeps_its_place_in_its_group(database: str, policy: str):
    """The next one of its group had its place first, and ran before it; of policy latest the older one ran at last."""
    registry = Registry()
    seen: list[int] = []

    @registry.job(group="transport", policy=policy)
    async def locate(job: Job[Ride]) -> None:
        seen.append(job.payload.number)

    async with connected(database) as person, AsyncExitStack() as stack:
        async with person.transaction():
            [locked, _] = await enqueue(database, locate, [Ride(transport="a", number=n) for n in (1, 2)], delay=0.2)
            await person.fetch("SELECT FROM sidings.job WHERE id = $1 FOR UPDATE", locked)
            await enqueue(database, locate, [Ride(transport="a", number=3)], delay=0.3)
            await enqueue(database, locate, [Ride(transport="b", number=4)], delay=0.4)
            await stack.enter_async_context(running(database, registry))
            await eventually(lambda: 4 in seen, "the other group's runs", seconds=10)
            await asyncio.sleep(1.0)
            assert seen == [4]
        await drained(database)
    assert seen == ([4, 1, 2, 3] if policy == "serial" else [4, 3])


async def test_a_delayed_job_waits_for_no_other_but_a_locked_one_that_is_before_it_in_the_order(database: str):
    """Jobs of policy parallel are in none, and what is held has left it, so that it supersedes nothing either."""
    async with connected(database) as connection, connected(database) as person:
        me = await connection.fetchval("INSERT INTO sidings.executor (id) VALUES (gen_random_uuid()) RETURNING id")
        acquire = f"SELECT acquired_epoch FROM sidings.acquire($1, '{{{ORIGIN}}}', 1, '1 hour', true)"
        epoch = await connection.fetchval(acquire, me)
        await connection.execute(
            f"""INSERT INTO sidings.job (origin, payload, position, type, "group", policy, run_at, held)
                SELECT '{ORIGIN}', '{{}}', NULL, v.type, v.its_group, v.policy, now() - v.ago * interval '1 s', v.held
                FROM (VALUES ('locked serial', 'a', 0, 4, NULL), ('behind it', 'a', 0, 3, NULL),
                             ('before it', 'a', 0, 5, NULL), ('parallel to it', 'a', 2, 3, NULL),
                             ('locked parallel', 'b', 2, 3, NULL), ('serial', 'b', 0, 3, NULL),
                             ('latest', 'c', 1, 3, NULL), ('latest', 'c', 1, 3, 'a person'),
                             ('held', 'd', 0, -60, 'a person'))
                     v (type, its_group, policy, ago, held)"""
        )
        async with person.transaction():
            await person.fetch("SELECT FROM sidings.job WHERE type LIKE 'locked%' FOR UPDATE")
            promote = load_sql("sidings.executor", "promote")
            row = await connection.fetchrow(promote, me, [ORIGIN], [epoch], 10, [], None, None)
        assert row is not None
        promoted = await connection.fetch("SELECT type FROM sidings.job WHERE position IS NOT NULL ORDER BY position")
        assert [job["type"] for job in promoted] == ["before it", "parallel to it", "serial", "latest"]
        assert row["promoted"] == 4
        begin = "SELECT run_at FROM sidings.job WHERE type = 'locked serial'"
        assert row["looked_at"] == await connection.fetchval(begin), "the next look begins there"
        assert row["next_due_in"] is None, "nothing is due later, and another look at once would find the same"
        await connection.fetchrow(promote, me, [ORIGIN], [epoch], 10, [], row["looked_at"], row["looked_at_id"])
        promoted = await connection.fetch("SELECT type FROM sidings.job WHERE position IS NOT NULL ORDER BY position")
        assert [job["type"] for job in promoted][4:] == ["locked serial", "behind it", "locked parallel"]


async def test_a_delayed_job_waits_for_none_of_another_origin_and_for_none_that_is_held(database: str):
    """Not even where that one is of a group of the same name, or has been delayed too and is before it in time."""
    origins = ["t/0", "t/1"]
    async with connected(database) as connection, connected(database) as person:
        me = await connection.fetchval("INSERT INTO sidings.executor (id) VALUES (gen_random_uuid()) RETURNING id")
        acquire = "SELECT acquired_epoch FROM sidings.acquire($1, $2, 1, '1 hour', true)"
        epochs = [row["acquired_epoch"] for row in await connection.fetch(acquire, me, origins)]
        await connection.execute(
            """INSERT INTO sidings.job (type, origin, "group", payload, position, run_at, held)
               SELECT v.type, v.origin, v.its_group, '{}', NULL, now() - v.ago * interval '1 s', v.held
               FROM (VALUES ('locked', 't/0', 'a', 4, NULL), ('elsewhere', 't/1', 'a', 3, NULL),
                            ('held', 't/0', 'b', 4, 'a person'), ('behind it', 't/0', 'b', 3, NULL))
                    v (type, origin, its_group, ago, held)"""
        )
        async with person.transaction():
            await person.fetch("SELECT FROM sidings.job WHERE type = 'locked' FOR UPDATE")
            promote = load_sql("sidings.executor", "promote")
            row = await connection.fetchrow(promote, me, origins, epochs, 10, [], None, None)
        assert row is not None
        promoted = await connection.fetch("SELECT type FROM sidings.job WHERE position IS NOT NULL ORDER BY type")
        assert [job["type"] for job in promoted] == ["behind it", "elsewhere"]


async def test_looks_that_begin_where_the_last_one_ended_promote_all_that_was_due(database: str):
    """Also where one had no room for all, in some origins or in each, and beside a locked row."""
    origins = [f"t/{n}" for n in range(4)]
    async with connected(database) as connection, connected(database) as person:
        me = await connection.fetchval("INSERT INTO sidings.executor (id) VALUES (gen_random_uuid()) RETURNING id")
        acquire = "SELECT acquired_epoch FROM sidings.acquire($1, $2, 1, '1 hour', true)"
        epochs = [row["acquired_epoch"] for row in await connection.fetch(acquire, me, origins)]
        await connection.execute(
            """INSERT INTO sidings.job (type, origin, payload, position, run_at)
               SELECT v.type, v.origin, '{}', NULL, (v.day || ' UTC')::timestamptz
               FROM (VALUES ('first', 't/0', '2026-01-01'), ('locked', 't/0', '2026-01-07'),
                            ('first', 't/1', '2026-01-05'), ('first', 't/1', '2026-01-06'), ('a', 't/1', '2026-01-06'),
                            ('b', 't/1', '2026-01-08'), ('c', 't/1', '2026-01-09'),
                            ('first', 't/2', '2026-01-02'), ('first', 't/2', '2026-01-03'), ('a', 't/2', '2026-01-04'),
                            ('first', 't/3', '2026-01-09')) v (type, origin, day)"""
        )
        promote = load_sql("sidings.executor", "promote")
        waiting = "SELECT type FROM sidings.job WHERE position IS NULL ORDER BY id"

        async def look(*begin: datetime | int | None) -> tuple[datetime, int]:
            row = await connection.fetchrow(promote, me, origins, epochs, 2, [], *begin)
            assert row is not None
            return row["looked_at"], row["looked_at_id"]

        async def at(origin: str, day: int) -> tuple[datetime, int]:
            moment = datetime(2026, 1, day, tzinfo=UTC)
            last = "SELECT max(id) FROM sidings.job WHERE origin = $1 AND run_at = $2"
            return moment, await connection.fetchval(last, origin, moment)

        async with person.transaction():
            await person.fetch("SELECT FROM sidings.job WHERE type = 'locked' FOR UPDATE")
            begin = await look(None, None)
            assert [job["type"] for job in await connection.fetch(waiting)] == ["locked", "a", "b", "c", "a"]
            assert begin == await at("t/2", 3), "so far the look has come in every origin"
            locked = await look(*begin)
            assert locked == await at("t/0", 7), "there is the locked one"
            assert [job["type"] for job in await connection.fetch(waiting)] == ["locked", "c"]
            assert await look(*locked) == locked
        begin = await look(*locked)
        assert not await connection.fetch(waiting)
        assert begin[0] > datetime(2026, 1, 9, tzinfo=UTC), "nothing that is due is left"

        for due in ("-infinity", "0044-03-15 BC"):  # Python has no time for either
            await connection.execute(
                f"""INSERT INTO sidings.job (type, origin, payload, position, run_at)
                    SELECT 'plain', 't/0', '{{}}', NULL, '{due}' FROM generate_series(1, 5)"""
            )
            begin = None, None
            for left in (3, 1, 0):
                begin = await look(*begin)
                assert len(await connection.fetch(waiting)) == left


async def test_of_jobs_due_at_one_moment_a_look_takes_those_from_the_id_on_at_which_the_last_one_ended(database: str):
    """Or from the first one that was locked then, in whatever origin. One that is stored later under an earlier id,
    when that moment has passed, is found by a whole look, like any that is due before it is committed."""
    origins = ["t/0", "t/1"]
    async with connected(database) as connection, connected(database) as person:
        me = await connection.fetchval("INSERT INTO sidings.executor (id) VALUES (gen_random_uuid()) RETURNING id")
        acquire = "SELECT acquired_epoch FROM sidings.acquire($1, $2, 1, '1 hour', true)"
        epochs = [row["acquired_epoch"] for row in await connection.fetch(acquire, me, origins)]
        moment = datetime(2026, 1, 1, tzinfo=UTC)
        insert = """INSERT INTO sidings.job (id, type, origin, payload, position, run_at) OVERRIDING SYSTEM VALUE
                    SELECT id, 'plain', $1, '{}', NULL, $2 FROM unnest($3::int[]) id"""
        await connection.execute(insert, "t/0", moment, [11, 13, 15, 17, 19])
        await connection.execute(insert, "t/1", moment, [12, 14, 16, 18])
        promote = load_sql("sidings.executor", "promote")

        async def look(*begin: datetime | int | None) -> tuple[tuple[datetime, int], list[int]]:
            row = await connection.fetchrow(promote, me, origins, epochs, 2, [], *begin)
            assert row is not None
            waiting = await connection.fetch("SELECT id FROM sidings.job WHERE position IS NULL ORDER BY id")
            return (row["looked_at"], row["looked_at_id"]), [job["id"] for job in waiting]

        async with person.transaction():
            await person.fetch("SELECT FROM sidings.job WHERE id = 14 FOR UPDATE")
            assert await look(None, None) == ((moment, 13), [14, 15, 16, 17, 18, 19])
            assert await look(moment, 13) == ((moment, 14), [14, 18, 19])
            await connection.execute(insert, "t/1", moment, [10])
            assert await look(moment, 14) == ((moment, 14), [10, 14])
        begin, waiting = await look(moment, 14)
        assert begin[0] > moment
        assert waiting == [10]
        assert (await look(None, None))[1] == []


async def test_one_look_promotes_no_more_than_twenty_origins_have_room_for(database: str):
    """Of a thousand origins, each of which had as many due, a look took longer than a call may take, and of some more
    none was ever promoted. An origin that alone has something due has all of its room."""
    origins = [f"t/{n}" for n in range(30)]
    async with connected(database) as connection:
        me = await connection.fetchval("INSERT INTO sidings.executor (id) VALUES (gen_random_uuid()) RETURNING id")
        acquire = "SELECT acquired_epoch FROM sidings.acquire($1, $2, 1, '1 hour', true)"
        epochs = [row["acquired_epoch"] for row in await connection.fetch(acquire, me, origins)]
        promote = load_sql("sidings.executor", "promote")
        insert = """INSERT INTO sidings.job (type, origin, payload, position, run_at)
                    SELECT 'plain', origin, '{}', NULL, now() - interval '1 s'
                    FROM unnest($1::text[]) origin, generate_series(1, $2)"""

        async def looks() -> list[int]:
            rows, begin = list[asyncpg.Record](), (None, None)
            while not rows or rows[-1]["more"]:
                rows += await connection.fetch(promote, me, origins, epochs, 6, [], *begin)
                begin = rows[-1]["looked_at"], rows[-1]["looked_at_id"]
            assert not await connection.fetchval("SELECT count(*) FROM sidings.job WHERE position IS NULL")
            return [row["promoted"] for row in rows]

        await connection.execute(insert, origins, 9)
        assert await looks() == [120, 120, 30]
        await connection.execute(insert, origins[:1], 9)
        assert await looks() == [6, 3]
        assert await looks() == [0]


async def test_a_delayed_job_that_is_put_off_or_held_while_it_is_looked_for_is_not_promoted(database: str):
    """The look had seen it as it was before."""
    async with connected(database) as connection, connected(database) as person:
        me = await connection.fetchval("INSERT INTO sidings.executor (id) VALUES (gen_random_uuid()) RETURNING id")
        acquire = f"SELECT acquired_epoch FROM sidings.acquire($1, '{{{ORIGIN}}}', 1, '1 hour', true)"
        epoch = await connection.fetchval(acquire, me)
        await connection.execute(
            f"""INSERT INTO sidings.job (type, origin, payload, position, run_at)
                SELECT v.type, '{ORIGIN}', '{{}}', NULL, now() - interval '1 s'
                FROM (VALUES ('put off'), ('held'), ('left alone')) v (type)"""
        )
        async with person.transaction():
            await person.execute("SELECT FROM sidings.origin FOR UPDATE")
            promote = load_sql("sidings.executor", "promote")
            looking = asyncio.create_task(connection.fetchrow(promote, me, [ORIGIN], [epoch], 10, [], None, None))
            waits = "SELECT cardinality(pg_blocking_pids($1)) > 0"
            await eventually(lambda: person.fetchval(waits, connection.get_server_pid()))
            await person.execute("UPDATE sidings.job SET run_at = now() + interval '1 hour' WHERE type = 'put off'")
            await person.execute("UPDATE sidings.job SET held = 'a person' WHERE type = 'held'")
        await looking
        promoted = await connection.fetch("SELECT type FROM sidings.job WHERE position IS NOT NULL")
        assert [job["type"] for job in promoted] == ["left alone"]


async def test_a_latest_group_under_a_steady_stream_still_runs(database: str):
    registry = Registry()
    seen: list[int] = []

    @registry.job(group="transport", policy="latest")
    async def locate(job: Job[Ride]) -> None:
        seen.append(job.payload.number)

    @registry.job(group="transport")
    async def load(job: Job[Ride]) -> None: ...

    async with running(database, registry):
        number = 0
        while len(seen) < 20:  # faster than reads follow
            payloads = [Ride(transport="a", number=number + more) for more in range(5)]
            await enqueue(database, locate, payloads)
            await enqueue(database, load, payloads[:1])
            number += 5
        await drained(database)
    assert seen == sorted(seen)
    assert seen[-1] == number - 1


# -- parallel -------------------------------------------------------------------------------------------------------


async def test_jobs_of_a_parallel_group_run_side_by_side_and_back_off_alone(database: str):
    registry = Registry()
    here: set[int] = set()
    all_here = asyncio.Event()

    @registry.job(group="transport", policy="parallel", retry=Retry(wait=wait_none()))
    async def notify(job: Job[Ride]) -> None:
        if job.payload.number == 99 and not job.failures:
            raise OSError("once")
        here.add(job.payload.number)
        if here == {1, 2, 3, 99}:
            all_here.set()
        await all_here.wait()

    @registry.job(group="transport", retry=Retry(wait=wait_fixed(NEVER)))
    async def stuck(job: Job[Ride]) -> None:
        raise OSError("for ever")

    async with running(database, registry, concurrency=4):
        await enqueue(database, stuck, [Ride(transport="a")])
        await eventually(lambda: value(database, "SELECT count(*) FROM sidings.job WHERE failures > 0"))
        await enqueue(database, notify, [Ride(transport="a", number=n) for n in (99, 1, 2, 3)])
        await eventually(lambda: value(database, "SELECT count(*) = 1 FROM sidings.job"))
    assert here == {1, 2, 3, 99}


async def test_a_policy_needs_a_group_and_a_known_name():
    registry = Registry()

    async def handler(job: Job[Ride]) -> None: ...

    with pytest.raises(ConfigurationError, match="needs group="):
        registry.job(policy="latest")(handler)
    with pytest.raises(ConfigurationError, match="'serial', 'latest' or 'parallel'"):
        registry.job(group="transport", policy="newest")(handler)  # type: ignore[arg-type]


# -- unique keys ----------------------------------------------------------------------------------------------------


@pytest.fixture
def registry() -> Registry:
    jobs = Registry()

    @jobs.job(name="sync")
    async def sync(job: Job[Ride]) -> None: ...

    return jobs


async def once(connection: asyncpg.Connection, registry: Registry, key: str = "k", **options: Any) -> JobId:
    return await registry["sync"].enqueue(connection, Ride(), origin=ORIGIN, unique_key=key, **options)


async def test_a_unique_key_gives_the_job_that_stands(database: str, registry: Registry):
    async with connected(database) as connection:
        async with connection.transaction():
            first = await once(connection, registry)
            assert await once(connection, registry) == first  # also within one transaction
            other = await once(connection, registry, "other")
        async with connection.transaction():
            assert await once(connection, registry, delay=60) == first
            # From SQL as well.
            sql = "SELECT sidings.enqueue('sync', '{}', 'transports/0', unique_key => 'k')"
            assert await connection.fetchval(sql) == first
    assert other != first
    assert await jobs_left(database) == 2


@pytest.mark.parametrize("way", ["Python", "SQL"])
async def test_a_delayed_job_with_a_unique_key_takes_its_place_when_it_is_due(database: str, way: str):
    """As all others. With a place from the start it would keep its group waiting until then."""
    ride = Registry().job(name="ride", group="transport", payload=Ride)(lambda job: None)
    async with connected(database) as connection, connection.transaction():
        if way == "SQL":
            sql = "SELECT sidings.enqueue('ride', '{}', $1, 'a', delay => '1 hour', unique_key => 'k')"
            await connection.fetchval(sql, ORIGIN)
        else:
            await ride.enqueue(connection, Ride(transport="a"), origin=ORIGIN, delay=3600, unique_key="k")
    [job] = await fetch(database, "SELECT position, run_at > now() AS is_later, unique_key FROM sidings.job")
    assert tuple(job) == (None, True, "k")


async def test_a_unique_key_is_free_again_when_its_job_has_ended(database: str):
    jobs = Registry()
    started, go_on = asyncio.Event(), asyncio.Event()

    @jobs.job(name="sync")
    async def sync(job: Job[Ride]) -> None:
        started.set()
        await go_on.wait()

    async with running(database, jobs), connected(database) as connection:
        async with connection.transaction():
            first = await once(connection, jobs)
        await started.wait()
        async with connection.transaction():
            assert await once(connection, jobs) == first  # it stands while it runs
        go_on.set()
        await drained(database)
        async with connection.transaction():
            assert await once(connection, jobs) != first
        await drained(database)
    assert await outcomes(database) == ["succeeded"] * 2


@pytest.mark.parametrize("commits", [True, False], ids=["which commits", "which rolls back"])
async def test_an_enqueue_of_a_key_waits_for_the_open_transaction_that_has_it(
    database: str, registry: Registry, commits: bool
):
    async with connected(database) as one, connected(database) as two, two.transaction():
        transaction = one.transaction()
        await transaction.start()
        first = await once(one, registry)
        second = asyncio.create_task(once(two, registry))
        waits, pid = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = $1", two.get_server_pid()
        await eventually(lambda: value(database, waits, pid), "the second waits")
        assert not second.done()
        await (transaction.commit() if commits else transaction.rollback())
        assert (await second == first) == commits
    assert await jobs_left(database) == 1


async def test_a_key_counts_for_its_type_only_and_at_home_too(database: str, registry: Registry):
    @registry.job(group="transport", home="transports")
    async def follow(job: Job[Ride]) -> None: ...

    async with connected(database) as connection, connection.transaction():
        await connection.execute("INSERT INTO sidings.topic (topic, partitions) VALUES ('transports', 3)")
        first = await once(connection, registry)
        at_home = await follow.enqueue(connection, Ride(transport="a"), unique_key="k")
        assert at_home != first
        assert await follow.enqueue(connection, Ride(transport="b"), unique_key="k") == at_home
        with pytest.raises(EnqueueError, match="unique_key is empty"):
            await once(connection, registry, "")
        with pytest.raises(EnqueueError, match="the group of the job 'sync' is empty"):
            await once(connection, registry, group="")


# -- batches --------------------------------------------------------------------------------------------------------


async def test_a_handler_that_takes_lists_gets_what_waits_up_to_its_size(database: str):
    registry = Registry()
    sizes: list[int] = []
    origins: set[frozenset[str]] = set()

    @registry.job(batch=50)
    async def post(jobs: list[Job[Ride]]) -> None:
        sizes.append(len(jobs))
        origins.add(frozenset(job.origin for job in jobs))

    await enqueue(database, post, [Ride(number=n) for n in range(400)])
    await enqueue(database, post, [Ride(number=n) for n in range(10)], origin="transports/1")
    async with running(database, registry, [ORIGIN, "transports/1"], concurrency=2):
        await drained(database)
    assert sum(sizes) == 410
    assert max(sizes) == 50
    assert len(sizes) < 30  # full ones, but where nothing more was in memory
    assert origins == {frozenset([ORIGIN]), frozenset(["transports/1"])}
    assert Counter(await outcomes(database)) == {"succeeded": 410}


async def test_a_batch_holds_no_two_jobs_of_a_group_and_keeps_their_order(database: str):
    registry = Registry()
    ledger = Ledger()

    @registry.job(group="transport", batch=20)
    async def post(jobs: list[Job[Ride]]) -> None:
        assert len({job.group for job in jobs}) == len(jobs)
        for job in jobs:
            ledger.start(job)
        await asyncio.sleep(0)
        for job in jobs:
            ledger.end(job)

    await enqueue(database, post, [Ride(transport=f"t{n % 7}", number=n) for n in range(140)])
    async with running(database, registry):
        await drained(database)
    assert ledger.overlaps == []
    assert all(ids == sorted(ids) for ids in ledger.by_group().values())
    assert Counter(await outcomes(database)) == {"succeeded": 140}


async def test_a_batch_of_policy_parallel_may_hold_several_jobs_of_a_group(database: str):
    registry, lists = Registry(), list[list[str | None]]()

    @registry.job(group="transport", policy="parallel", batch=20)
    async def post(jobs: list[Job[Ride]]) -> None:
        lists.append([job.group for job in jobs])

    await enqueue(database, post, [Ride(transport="a", number=n) for n in range(10)])
    async with running(database, registry, concurrency=1):
        await drained(database)
    assert sum(map(len, lists)) == 10
    assert max(map(len, lists)) > 1
    assert {group for groups in lists for group in groups} == {"a"}


async def test_a_type_that_takes_lists_gets_them_also_where_it_is_declared_while_the_executor_runs(database: str):
    """Its handler got single jobs, and failed for ever, as what it goes through is no list."""
    registry, included = Registry(), Registry()
    given: list[Any] = []
    async with running(database, registry):

        @included.job(batch=10, retry=Retry(stop=stop_after_attempt(1)))
        async def post(jobs: list[Job[Ride]]) -> None:
            given.append(jobs)

        registry.include(included)
        await enqueue(database, post, [Ride(number=n) for n in range(3)])
        await drained(database)
    assert [job.payload.number for jobs in given for job in jobs] == [0, 1, 2]


async def test_each_job_of_a_batch_has_an_outcome_of_its_own(database: str):
    registry = Registry()
    attempts: list[list[int]] = []

    @registry.job(batch=10, retry=Retry(wait=wait_none()))
    async def post(jobs: list[Job[Ride]]) -> list[object]:
        attempts.append([job.payload.number for job in jobs])
        if jobs[0].attempt > 1:
            return [None]
        answers: dict[int, object] = {
            1: Discard("gone"),
            2: OSError("later"),
            3: Retry.after(0),
            4: Snooze(0),
            5: "text",
        }
        return [answers.get(job.payload.number) for job in jobs]

    ids = await enqueue(database, post, [Ride(number=n) for n in range(6)])
    await fetch(database, "UPDATE sidings.job SET payload = '[]' WHERE id = $1", ids[0])  # fits no model
    async with running(database, registry):
        await eventually(lambda: value(database, "SELECT count(*) = 1 FROM sidings.job"))
    assert attempts[0] == [1, 2, 3, 4, 5]  # the invalid one is held, and spoils nothing
    assert sorted(attempts[1:]) == [[2], [3], [4]]  # each alone; the snoozed one is a batch again, of one
    rows = await history(database, "job_id, outcome")
    told = {ids.index(row["job_id"]): [] for row in rows}
    for row in rows:
        told[ids.index(row["job_id"])].append(row["outcome"])
    assert told == {
        0: ["held"],
        1: ["discarded"],
        2: ["retried", "succeeded"],
        3: ["retried", "succeeded"],
        4: ["snoozed", "succeeded"],
        5: ["succeeded"],
    }


async def test_what_a_batch_raises_fails_all_of_it_and_each_is_tried_alone(database: str):
    registry = Registry()
    sizes: list[int] = []

    @registry.job(batch=10, retry=Retry(wait=wait_none(), stop=stop_after_attempt(3)))
    def post(jobs: list[Job[Ride]]) -> None:  # a plain function as well
        sizes.append(len(jobs))
        if any(job.payload.number == 3 for job in jobs):
            raise ValueError("one bad job")

    await enqueue(database, post, [Ride(number=n) for n in range(5)])
    async with running(database, registry):
        await drained(database)
    assert sizes[0] == 5
    assert set(sizes[1:]) == {1}
    assert Counter((await ended(database)).values()) == {"succeeded": 4, "discarded": 1}


class Leaving(Ride):
    @field_validator("number")
    @classmethod
    def leave(cls, number: int) -> int:
        if number == 3:
            raise SystemExit
        return number


@pytest.mark.parametrize("model", [Ride, Leaving], ids=["the handler", "the model"])
@pytest.mark.parametrize("error", [SystemExit, GeneratorExit])
async def test_whatever_a_batch_raises_its_jobs_have_failed_and_others_go_on(
    database: str, model: type[Ride], error: type[BaseException]
):
    registry = Registry()

    @registry.job(name="post", batch=10, retry=Retry(wait=wait_none(), stop=stop_after_attempt(2)))
    async def post(jobs: list[Job[model]]) -> None:  # type: ignore[valid-type]
        if any(job.payload.number == 3 for job in jobs):
            raise error

    elsewhere = Registry()  # whose model bears all numbers

    @elsewhere.job(name="post", payload=Ride)
    async def here(job: Job[Ride]) -> None: ...

    await enqueue(database, here, [Ride(number=n) for n in range(5)])
    async with running(database, registry) as executor:
        await drained(database)
        assert executor.problems() == []
    assert Counter((await ended(database)).values()) == {"succeeded": 4, "discarded": 1}


async def test_a_batch_that_answers_with_the_wrong_length_has_failed(database: str):
    registry = Registry()

    @registry.job(batch=10, retry=Retry(stop=stop_after_attempt(1)))
    async def post(jobs: list[Job[Ride]]) -> list[None]:
        return [None]

    await enqueue(database, post, [Ride(number=n) for n in range(3)])
    async with running(database, registry):
        await drained(database)
    [row, *_] = await history(database, "outcome, error_message")
    assert row["outcome"] == "discarded"
    assert "for each of its 3 jobs None or an error; it returned list" in row["error_message"]


async def test_a_batch_is_cancelled_at_its_timeout_as_a_whole(database: str):
    registry = Registry()

    @registry.job(batch=10, timeout=0.05, retry=Retry(stop=stop_after_attempt(1)))
    async def post(jobs: list[Job[Ride]]) -> None:
        await asyncio.Event().wait()

    await enqueue(database, post, [Ride(number=n) for n in range(3)])
    async with running(database, registry):
        await drained(database)
    assert {row["error_class"] for row in await history(database, "error_class")} == {"TimeoutError"}


async def test_a_batch_is_declared_with_a_list_and_a_sensible_size():
    registry = Registry()

    async def single(job: Job[Ride]) -> None: ...

    async def several(jobs: list[Job[Ride]]) -> None: ...

    for options, told in [
        ({"batch": 1}, "2 to 500"),
        ({"batch": 501}, "2 to 500"),
        ({"batch": 9, "transactional": True}, "exclude each other"),
        ({"batch": 9, "retry": Retry(retry=retry_if_result(bool))}, "return errors instead"),
    ]:
        with pytest.raises(ConfigurationError, match=told):
            registry.job(**options)(several)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"list\[Job\[X\]\], or leave batch= out"):
        registry.job(batch=9)(single)
    with pytest.raises(ConfigurationError, match="give batch="):
        registry.job()(several)


# -- blocked groups -------------------------------------------------------------------------------------------------


async def test_an_exhausted_job_blocks_its_group_until_a_person_decides(database: str):
    registry = Registry()
    seen: list[tuple[str, int]] = []

    @registry.job(group="transport", retry=Retry(wait=wait_none(), stop=stop_after_attempt(2), on_exhausted="block"))
    async def pay(job: Job[Ride]) -> None:
        seen.append((job.payload.transport, job.payload.number))
        if job.payload == Ride(transport="a", number=0):
            raise PermissionError("the account is closed")

    [head] = await enqueue(database, pay, [Ride(transport="a", number=0)])
    await enqueue(database, pay, [Ride(transport="a", number=1), Ride(transport="b", number=2)])
    for _ in range(2):  # it stays so for the next executor
        async with running(database, registry):
            await eventually(lambda: value(database, "SELECT run_at = 'infinity' FROM sidings.job WHERE id = $1", head))
            await enqueue(database, pay, [Ride(transport="b", number=3)])
            await eventually(lambda: value(database, "SELECT count(*) = 2 FROM sidings.job"))
    assert seen.count(("a", 0)) == 2
    assert ("a", 1) not in seen
    [row] = await fetch(database, "SELECT position, held, failures, error FROM sidings.job WHERE id = $1", head)
    assert row["position"] is not None
    assert (row["held"], row["failures"]) == (None, 2)
    assert without_place(row["error"]) == "PermissionError: the account is closed"
    told = [r["outcome"] for r in await history(database, "outcome, job_id, attempt") if r["job_id"] == head]
    assert sorted(told) == ["held", "retried"]


@pytest.mark.long
async def test_groups_that_wait_for_a_person_are_counted_apart_from_those_that_back_off(database: str):
    """What nothing would ever try again could be told from an outage that passes by no figure."""
    exposed, registry = CollectorRegistry(), Registry()

    @registry.job(group="transport", retry=Retry(stop=stop_after_attempt(1), on_exhausted="block"))
    async def pay(job: Job[Ride]) -> None:
        if job.payload.transport != "c":
            raise ConnectionError("the bank does not answer")

    @registry.job(group="transport", retry=Retry(wait=wait_fixed(NEVER)))
    async def tell(job: Job[Ride]) -> None:
        raise ConnectionError("the carrier does not answer")

    await enqueue(database, pay, [Ride(transport=name) for name in ("a", "a", "b", "c")])
    await enqueue(database, tell, [Ride(transport="d")])
    await enqueue(database, pay, [Ride(transport="x")], origin="transports/9")  # another executor's

    def figure(name: str) -> float | None:
        return exposed.get_sample_value(f"sidings_{name}", {"service": "test"})

    async with running(database, registry, prometheus=exposed):
        await eventually(lambda: figure("blocked_groups") == 3 and figure("blocked_jobs") == 2)
        assert figure("held_jobs") == 0
        async with connected(database) as connection:
            [head] = await connection.fetchval(
                "SELECT array_agg(id) FROM sidings.job WHERE \"group\" = 'b' AND run_at = 'infinity'"
            )
            await connection.execute("SELECT sidings.discard_job($1, actor => 'alice')", head)
        await eventually(lambda: figure("blocked_jobs") == 1)


async def test_only_a_group_that_has_an_order_can_be_blocked():
    registry = Registry()

    async def handler(job: Job[Ride]) -> None: ...

    with pytest.raises(ConfigurationError, match="needs group="):
        registry.job(retry=Retry(on_exhausted="block"))(handler)
    with pytest.raises(ConfigurationError, match="keeps its order"):
        registry.job(group="transport", policy="parallel", retry=Retry(on_exhausted="block"))(handler)
