"""`sidings.testing`: what a service's own tests use."""

import asyncio
import json
import math
import os
import re
import sys
import threading
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, field_validator
from sidings import (
    Admin,
    Call,
    ConfigurationError,
    Discard,
    Job,
    Message,
    MissingOrigin,
    Next,
    PostgresUnavailable,
    Registry,
    Retry,
    SchemaMissing,
    SchemaTooOld,
    Service,
    Snooze,
    Transaction,
)
from sidings.jobs.context import correlated
from sidings.kafka.calling import working_on
from sidings.schema import migrate
from sidings.testing import NotDrained, advance, drain, enqueued
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from tenacity import stop_after_attempt, stop_after_delay, wait_fixed

from .guide import DOCS, run
from .support import (
    ORIGIN,
    SECONDS,
    Ride,
    connected,
    enqueue,
    eventually,
    fetch,
    history,
    jobs_left,
    outcomes,
    running,
    value,
)


def declare(handler: Any, schema: str | None = None, **options: Any) -> tuple[Registry, Any]:
    registry = Registry(schema=schema)
    arguments: dict[str, Any] = {"name": "ride", "group": "transport", "payload": Ride, **options}
    return registry, registry.job(**arguments)(handler)


# -- drain --------------------------------------------------------------------------------------------------------


async def test_jobs_run_by_position_within_a_group_and_by_priority_between_groups(database: str):
    seen: list[tuple[str, int]] = []

    async def handler(job: Job[Ride]) -> None:
        seen.append((job.payload.transport, job.payload.number))

    registry, ride = declare(handler)
    await enqueue(database, ride, [Ride(transport="a", number=n) for n in range(3)], origin="t/0")
    await enqueue(database, ride, [Ride(transport="b", number=n) for n in range(2)], origin="t/1", priority=5)
    await enqueue(database, ride, [Ride(transport="a", number=9)], priority=9, origin="t/0")
    attempts = await drain(database, registry)
    assert seen == [("b", 0), ("b", 1), ("a", 0), ("a", 1), ("a", 2), ("a", 9)]
    assert [(a.payload.transport, a.payload.number) for a in attempts] == seen
    assert {a.outcome for a in attempts} == {"succeeded"}
    assert await jobs_left(database) == 0
    assert [row["outcome"] for row in await history(database)] == ["succeeded"] * 6
    assert await drain(database, registry) == []


async def test_jobs_that_handlers_enqueue_run_too_also_in_new_origins(database: str):
    async def handler(job: Job[Ride]) -> None:
        if job.payload.number:
            below = Ride(transport="a", number=job.payload.number - 1)
            async with connected(database) as connection, connection.transaction():
                await ride.enqueue(connection, below, origin=f"other/{below.number}")

    registry, ride = declare(handler)
    await enqueue(database, ride, [Ride(transport="a", number=3)])
    assert [a.origin for a in await drain(database, registry)] == [ORIGIN, "other/2", "other/1", "other/0"]


async def test_outcomes_are_those_of_an_executor(database: str):
    async def handler(job: Job[Ride]) -> None:
        match job.payload.transport:
            case "discard":
                raise Discard("no use")
            case "snooze":
                raise Snooze(30)
            case "fail":
                raise ValueError("broken")
            case "slow":
                await asyncio.Event().wait()
            case _:
                return

    registry, ride = declare(handler, retry=Retry(wait=wait_fixed(7)), timeout=0.05)
    for kind in ("discard", "snooze", "fail", "slow"):
        await enqueue(database, ride, [Ride(transport=kind)])
    await value(database, f"SELECT sidings.enqueue('ride', '{{\"number\": []}}', '{ORIGIN}', 'x')")
    attempts = {a.group: a for a in await drain(database, registry)}
    assert {group: (a.outcome.value, a.delay) for group, a in attempts.items()} == {
        "discard": ("discarded", None),
        "snooze": ("snoozed", 30),
        "fail": ("retried", 7),
        "slow": ("retried", 7),
        "x": ("held", None),
    }
    assert attempts["fail"].error is not None
    assert (attempts["fail"].error.error_class, attempts["fail"].error.message) == ("ValueError", "broken")
    stored = {row["group"]: row["outcome"] for row in await history(database)}
    assert stored == {group: a.outcome for group, a in attempts.items()}


async def test_what_a_models_validator_raises_holds_the_job(database: str):
    class Tyre(BaseModel):
        size: str

        @field_validator("size")
        @classmethod
        def in_inches(cls, size: str) -> str:
            return {"195": "16"}[size]

    registry, _ = declare(lambda job: None, payload=Tyre, group=None)
    await value(database, f"SELECT sidings.enqueue('ride', '{{\"size\": \"7\"}}', '{ORIGIN}')")
    [attempt] = await drain(database, registry)
    assert (attempt.outcome, attempt.payload) == ("held", '{"size": "7"}')


async def test_a_database_without_the_tables_or_with_old_ones_is_told_as_such(empty_database: str):
    registry, _ = declare(lambda job: None)
    with pytest.raises(SchemaMissing, match=r"python -m sidings\.schema --service NAME"):
        await drain(empty_database, registry)
    await migrate(empty_database, service="test")
    await value(
        empty_database, "DELETE FROM sidings.migration WHERE version = (SELECT max(version) FROM sidings.migration)"
    )
    with pytest.raises(SchemaTooOld):
        await drain(empty_database, registry)


async def test_plain_functions_and_transactional_handlers_run(database: str):
    registry = Registry()

    @registry.job(group="transport")
    def plain(job: Job[Ride]) -> None: ...

    @registry.job(group="transport", transactional=True)
    async def exact(job: Job[Ride]) -> None:
        await job.tx.execute("INSERT INTO effect VALUES ($1)", job.payload.transport)
        if job.attempt == 1:
            raise ValueError("the first effect is rolled back")

    async with connected(database) as connection:
        await connection.execute("CREATE TABLE effect (of text)")
    await enqueue(database, plain, [Ride(transport="a")])
    await enqueue(database, exact, [Ride(transport="b")])
    attempts = await drain(database, registry, until=math.inf)
    assert [(a.type, a.outcome) for a in attempts] == [
        ("plain", "succeeded"),
        ("exact", "retried"),
        ("exact", "succeeded"),
    ]
    assert await value(database, "SELECT array_agg(of) FROM effect") == ["b"]
    assert await jobs_left(database) == 0


async def test_what_is_due_in_thousands_of_years_is_left_alone_as_what_never_is(database: str):
    """Postgres could not move what is stored so far into the past."""
    registry, ride = declare(lambda job: None)
    ids = await enqueue(database, ride, [Ride(transport="a"), Ride(transport="b")], delay=60)
    async with connected(database) as connection:
        await connection.execute("UPDATE sidings.job SET run_at = '9999-12-30Z' WHERE id = $1", ids[1])
    assert [attempt.job_id for attempt in await drain(database, registry, until=math.inf)] == ids[:1]
    with pytest.raises(ValueError, match="until=nan"):
        await drain(database, registry, until=math.nan)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda dsn, jobs, _: drain(dsn), r"drain\(str\): give a DSN and the registry"),
        (lambda dsn, jobs, _: drain(dsn, [jobs]), r"drain\(str, list\): give a DSN and the registry"),
        (lambda dsn, jobs, _: drain(dsn, Service("test", prometheus=None)), r"drain\(str, Service\): give a DSN and"),
        (lambda dsn, jobs, _: drain(jobs, dsn), r"drain\(Registry, str\): give a DSN and the registry"),
        (lambda dsn, jobs, _: drain(Service("test", postgres=dsn, prometheus=None), jobs), r"or a service alone"),
        (lambda dsn, jobs, _: drain(dsn, jobs, until="x"), r"drain\(until='x'\): give seconds"),
        (lambda dsn, jobs, _: drain(dsn, jobs, limit=0), r"drain\(limit=0\): give a whole number, 1 or more"),
        (lambda dsn, jobs, _: drain(dsn, jobs, limit="7"), r"drain\(limit='7'\): give a whole number"),
        (lambda _, jobs, own: enqueued(own, "ride"), r"enqueued\(..., 'ride'\): give a connection, then the job type"),
        (lambda _, jobs, own: enqueued(next(iter(jobs)), own), r"enqueued\(..., <asyncpg.*: give a connection, then"),
        (lambda _, jobs, own: enqueued(own, next(iter(jobs)), group=5), r"enqueued\(group=5\): give a text, or None"),
        (lambda _, jobs, own: advance(own, "x"), r"advance\(seconds='x'\): give seconds"),
        (lambda _, jobs, own: advance(own, math.inf), r"advance\(seconds=inf\): give a thousand years at most"),
    ],
)
async def test_a_wrong_argument_is_named_with_the_remedy_and_nothing_is_done(database: str, call: Any, told: str):
    """Of most it was an AttributeError from inside; a registry beside a service was passed over, and infinity made of
    each time one before all others, and of each delay none."""
    registry, ride = declare(lambda job: None)
    await enqueue(database, ride, [Ride(transport="a")], delay=60)
    before = await fetch(database, "SELECT * FROM sidings.job")
    async with connected(database) as own:
        with pytest.raises((TypeError, ValueError), match=told) as refused:
            await call(database, registry, own)
    assert database not in str(refused.value), "it may hold a password"
    assert await fetch(database, "SELECT * FROM sidings.job") == before


async def test_time_jumps_to_what_becomes_due_and_not_beyond_until(database: str):
    async def handler(job: Job[Ride]) -> None:
        if job.payload.transport == "fail":
            raise ValueError("broken")
        ages[job.payload.transport] = (datetime.now(UTC) - job.enqueued_at).total_seconds()

    ages: dict[str, float] = {}
    registry, ride = declare(handler, retry=Retry(wait=wait_fixed(100)))
    began = datetime.now(UTC)
    await enqueue(database, ride, [Ride(transport="fail")])
    await enqueue(database, ride, [Ride(transport="hour")], delay=3600)
    await enqueue(database, ride, [Ride(transport="day")], run_at=began + timedelta(days=1))
    attempts = await drain(database, registry, until=timedelta(seconds=250))
    assert [(a.group, round(a.after, -1)) for a in attempts] == [("fail", 0), ("fail", 100), ("fail", 200)]
    attempts = await drain(database, registry, until=3600)
    assert [a.group for a in attempts if a.group != "fail"] == ["hour"]
    assert ages["hour"] > 3600 - SECONDS
    assert datetime.now(UTC) - began < timedelta(seconds=SECONDS)
    async with connected(database) as connection:
        await advance(connection, timedelta(days=1))
    assert {a.group for a in await drain(database, registry)} == {"fail", "day"}


async def test_a_job_that_becomes_due_between_two_looks_is_run(database: str, monkeypatch: pytest.MonkeyPatch):
    """A look for what is due came too early for it, and the one for what will be due came too late."""
    drainer = sys.modules[drain.__module__]._Drainer
    registry, next_due = Registry(), drainer.next_due

    @registry.job()
    async def ride(job: Job[Ride]) -> None: ...

    async def a_moment_later(self: Any) -> float | None:
        await self._connection.execute("UPDATE sidings.job SET run_at = clock_timestamp() WHERE position IS NULL")
        return await next_due(self)

    await enqueue(database, ride, [Ride()], delay=3600)
    monkeypatch.setattr(drainer, "next_due", a_moment_later)
    assert len(await drain(database, registry)) == 1


async def test_policies_see_the_simulated_time(database: str):
    async def handler(job: Job[Ride]) -> None:
        raise ValueError("broken")

    registry, ride = declare(handler, retry=Retry(wait=wait_fixed(100), stop=stop_after_delay(250)))
    await enqueue(database, ride, [Ride(transport="a")])
    attempts = await drain(database, registry, until=math.inf)
    assert [a.outcome for a in attempts] == ["retried", "retried", "retried", "discarded"]


async def test_a_jobs_key_is_the_same_for_all_of_its_attempts_although_time_passes(database: str):
    """Each attempt saw its job enqueued earlier, so an effect that guarantee 2 makes idempotent was done again."""
    keys: list[tuple[int, float]] = []
    ages: list[float] = []

    async def handler(job: Job[Ride]) -> None:
        keys.append((job.id, job.enqueued_timestamp))
        ages.append((datetime.now(UTC) - job.enqueued_at).total_seconds())
        if job.attempt < 3:
            raise ValueError("broken")

    registry, ride = declare(handler, retry=Retry(wait=wait_fixed(60)))
    await enqueue(database, ride, [Ride(transport="a")])
    assert len(await drain(database, registry, until=60)) == 2
    assert len(set(keys)) == 1
    async with connected(database) as connection:
        await advance(connection, 60)
    assert len(await drain(database, registry)) == 1
    assert ages[2] >= ages[0] + 119, "between drains it ages, as the documentation says"


async def test_a_failing_head_holds_its_group_and_no_other(database: str):
    async def handler(job: Job[Ride]) -> None:
        if job.payload.number == 0 and job.attempt == 1:
            raise ValueError("broken")

    registry, ride = declare(handler, retry=Retry(wait=wait_fixed(10), stop=stop_after_attempt(5)))
    rides = [Ride(transport="a", number=0), Ride(transport="a", number=1), Ride(transport="b", number=2)]
    await enqueue(database, ride, rides)
    assert [a.payload.number for a in await drain(database, registry, until=60)] == [0, 2, 0, 1]


async def test_a_job_that_comes_back_for_ever_ends_the_drain(database: str):
    tried: list[int] = []

    async def handler(job: Job[Ride]) -> None:
        tried.append(job.id)
        raise Snooze(0)

    registry, ride = declare(handler)
    await enqueue(database, ride, [Ride(transport="a")])
    with pytest.raises(NotDrained, match="left after 7 attempts"):
        await drain(database, registry, limit=7)
    assert len(tried) == 7


async def test_a_list_is_no_longer_than_the_drains_limit(database: str):
    """The last one was as long as its handler takes, and nothing said that jobs were left."""
    registry = Registry()

    @registry.job(batch=10)
    async def post(jobs: list[Job[Ride]]) -> None: ...

    await enqueue(database, post, [Ride(number=n) for n in range(8)])
    with pytest.raises(NotDrained, match="left after 3 attempts"):
        await drain(database, registry, limit=3)
    assert await jobs_left(database) == 5


async def test_jobs_of_a_running_executor_are_not_touched(database: str):
    registry, ride = declare(lambda job: None)
    async with running(database, Registry()):  # it has the origin, and no handler
        await enqueue(database, ride, [Ride(transport="a")])
        with pytest.raises(NotDrained, match=ORIGIN):
            await drain(database, registry)
    assert len(await drain(database, registry)) == 1


async def test_handlers_may_act_as_persons_do(database: str):
    registry, ids, seen = Registry(), dict[str, Any](), list[str]()

    @registry.job(group="transport", retry=Retry(stop=stop_after_attempt(1), on_exhausted="hold"))
    async def ride(job: Job[Ride]) -> None:
        seen.append(f"{job.payload.transport} {job.attempt}")
        async with connected(database) as connection:
            admin = Admin(connection, actor="a breaker")
            match job.payload.transport:
                case "held" if job.attempt == 1:
                    raise ValueError("broken")
                case "releases":
                    await admin.release(ids["held"])
                case "cancels":
                    await admin.cancel(ids["cancelled"])
                case "ends itself":
                    await admin.cancel(job.id)
                    if job.payload.number:
                        await asyncio.sleep(SECONDS)
                case "pauses":
                    await admin.pause(type="ride", reason="the carrier is away")

    for transport in ("held", "releases", "cancels", "cancelled", "ends itself", "pauses", "waits"):
        [ids[transport]] = await enqueue(database, ride, [Ride(transport=transport)])
    await enqueue(database, ride, [Ride(transport="ends itself", number=1)], priority=-1)
    await enqueue(database, ride, [Ride(transport="ends itself", number=1)], origin="t/1", priority=100)
    async with asyncio.timeout(SECONDS / 2):
        attempts = await drain(database, registry)
    assert seen == ["ends itself 1", "held 1", "releases 1", "cancels 1", "ends itself 1", "pauses 1"]
    assert [a.outcome for a in attempts] == ["cancelled", "held", "succeeded", "succeeded", "cancelled", "succeeded"]
    assert await jobs_left(database) == 3  # which the pause keeps
    assert await fetch(database, "SELECT id FROM sidings.executor") == []
    async with connected(database) as connection:
        await Admin(connection, actor="alice").resume(type="ride")
    seen.clear()
    await drain(database, registry)
    assert seen == ["waits 1", "held 2", "ends itself 1"]
    assert await jobs_left(database) == 0


@pytest.mark.parametrize("transactional", [False, True])
async def test_a_drain_whose_jobs_are_taken_over_meanwhile_says_so(database: str, transactional: bool):
    async def handler(job: Job[Ride]) -> None:
        async with connected(database) as connection, connection.transaction():  # as somebody who takes them over
            await connection.execute("UPDATE sidings.origin SET owner = NULL, epoch = epoch + 1")
            await connection.execute("UPDATE sidings.executor SET fence = fence + 1")

    registry, ride = declare(handler, transactional=transactional)
    await enqueue(database, ride, [Ride(transport="a")])
    async with asyncio.timeout(SECONDS):
        with pytest.raises(NotDrained, match="another executor has taken"):
            await drain(database, registry)
    assert await jobs_left(database) == 1


@pytest.mark.parametrize("again", [False, True], ids=["once", "again and again"])
@pytest.mark.parametrize("transactional", [False, True])
async def test_a_drain_that_is_cut_off_leaves_its_job_waiting_and_nothing_else(
    database: str, transactional: bool, again: bool
):
    """Also by a scope of anyio's, which cancels at each turn of the loop: that had it give nothing back."""

    async def handler(job: Job[Ride]) -> None:
        if not entered.is_set():
            entered.set()
            await asyncio.Event().wait()

    entered = asyncio.Event()
    registry, ride = declare(handler, transactional=transactional)
    await enqueue(database, ride, [Ride(transport="a")])
    drainer = asyncio.create_task(drain(database, registry))
    await entered.wait()
    drainer.cancel()
    while again and not drainer.done():
        drainer.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await drainer
    assert await fetch(database, "SELECT id FROM sidings.executor") == []
    assert await value(database, "SELECT state FROM sidings.job_overview") == "waiting"
    assert [(a.attempt, a.outcome) for a in await drain(database, registry)] == [(1, "succeeded")]


async def fails_to_roll_back(call: Call, call_next: Next) -> None:
    try:
        await call_next()
    except asyncio.CancelledError as error:
        raise ConnectionError("there is nothing to roll back any more") from error


@pytest.mark.parametrize(
    ("times", "middleware"),
    [(1, []), (3, []), (1, [fails_to_roll_back])],
    ids=["once", "again and again", "inside of a middleware"],
)
async def test_a_drain_that_is_cut_off_waits_for_a_plain_function(
    database: str, monkeypatch: pytest.MonkeyPatch, times: int, middleware: list[Any]
):
    """Its thread went on, and the next drain ran the same job beside it."""

    def handler(job: Job[Ride]) -> None:
        told.append("begins")
        entered.set()
        assert goes_on.wait(SECONDS)
        told.append("ends")

    told: list[str] = []
    entered, goes_on = threading.Event(), threading.Event()
    registry, ride = declare(handler)
    registry.middleware += middleware
    await enqueue(database, ride, [Ride(transport="a")])
    monkeypatch.setattr(sys.modules[drain.__module__], "_RENEW_SECONDS", 0.0)
    drainer = asyncio.create_task(drain(database, registry))
    await asyncio.to_thread(entered.wait, SECONDS)
    try:
        for _ in range(times):
            drainer.cancel()
            await asyncio.wait([drainer], timeout=0.5)
        assert not drainer.done()
        lease = f"SELECT lease_until FROM sidings.origin WHERE origin = '{ORIGIN}'"
        before = await value(database, lease)
        await eventually(lambda: fetch(database, lease + " AND lease_until > $1", before), "its lease is renewed")
        with pytest.raises(NotDrained, match=ORIGIN):
            await drain(database, registry)
    finally:
        goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await drainer
    assert [a.outcome for a in await drain(database, registry)] == ["succeeded"]
    assert told == ["begins", "ends"] * 2
    assert await fetch(database, "SELECT id FROM sidings.executor") == []


async def test_a_drain_that_is_cut_off_does_not_wait_for_ever_for_a_function_that_waits_for_the_test(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """As for a lock of the test's transaction: with neither a result nor a word the tests stood still."""

    def handler(job: Job[Ride]) -> None:
        begun.set()
        asyncio.run(fetch(database, "UPDATE told SET n = 2"))
        returned.set()

    begun, returned = threading.Event(), threading.Event()
    registry, ride = declare(handler)
    await enqueue(database, ride, [Ride(transport="a")])
    await fetch(database, "CREATE TABLE told AS SELECT 1 AS n")
    monkeypatch.setattr(sys.modules[drain.__module__], "_PATIENCE_SECONDS", 1.0)
    async with connected(database) as connection, connection.transaction():
        await connection.execute("UPDATE told SET n = 3")
        drainer = asyncio.create_task(drain(database, registry))
        assert await asyncio.to_thread(begun.wait, SECONDS)
        drainer.cancel()
        async with asyncio.timeout(SECONDS):
            with pytest.raises(NotDrained, match=f"^ride: its plain function goes on.* {ORIGIN} is free"):
                await drainer
    await asyncio.to_thread(returned.wait, SECONDS)
    with pytest.raises(NotDrained, match=f"has the jobs of {ORIGIN}"):
        await drain(database, registry)


async def test_a_drain_that_is_cut_off_at_any_moment_gives_all_back(database: str):
    registry, ride = declare(lambda job: None)
    await enqueue(database, ride, [Ride(transport=str(n)) for n in range(300)])
    async with connected(database) as connection:
        for step in range(30):
            drainer = asyncio.create_task(drain(database, registry))
            await asyncio.sleep(0.015 + step * 0.0017)
            drainer.cancel()
            await asyncio.wait([drainer])
            assert await connection.fetch("SELECT id FROM sidings.executor") == []
            assert await connection.fetch("SELECT origin FROM sidings.origin WHERE owner IS NOT NULL") == []
    await drain(database, registry)
    assert sorted(await outcomes(database)) == ["succeeded"] * 300


async def test_a_drain_that_was_killed_keeps_others_away_for_a_minute_at_most(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    program = (
        "import asyncio, os, sys\n"
        "from sidings import Registry\n"
        "from sidings.testing import drain\n"
        "registry = Registry()\n"
        "registry.job(name='ride', payload=dict)(lambda job: os._exit(9))\n"
        "asyncio.run(drain(sys.argv[1], registry))\n"
    )
    registry, ride = declare(lambda job: None)
    await enqueue(database, ride, [Ride(transport="a")])
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, database)
    assert await process.wait() == 9
    assert await value(database, "SELECT lease_until < now() + interval '61 seconds' FROM sidings.origin")
    with pytest.raises(NotDrained, match="killed is free within 60 s"):
        await drain(database, registry)
    await value(database, "UPDATE sidings.origin SET lease_until = now() - interval '1 second'")
    monkeypatch.setattr(sys.modules[drain.__module__], "_LEASE", timedelta(0))  # as if the server were older
    assert [(a.attempt, a.outcome) for a in await drain(database, registry)] == [(2, "succeeded")]
    assert await outcomes(database) == ["lost", "succeeded"]


async def test_what_has_killed_its_process_again_and_again_is_held_as_by_an_executor(database: str):
    """It ran, and killed the tests' process once more."""
    registry, ride = declare(lambda job: None, retry=Retry(on_exhausted="block"))
    [poison, _] = await enqueue(database, ride, [Ride(transport="a"), Ride(transport="a")])
    last_chance, _ = await enqueue(database, ride, [Ride(transport="b"), Ride(transport="b")])
    await value(database, "UPDATE sidings.job SET losses = 6, attempt = 7 WHERE id = $1", poison)
    await value(database, "UPDATE sidings.job SET losses = 5, attempt = 6 WHERE id = $1", last_chance)
    attempts = await drain(database, registry, until=math.inf)
    assert [(a.group, a.attempt, a.outcome) for a in attempts] == [
        ("a", 7, "held"),
        ("b", 6, "succeeded"),
        ("b", 1, "succeeded"),
    ]
    assert attempts[0].error is not None
    assert attempts[0].error.error_class == "Poison"
    assert await jobs_left(database) == 2


async def test_leases_are_renewed_while_a_job_runs_and_between_jobs(database: str, monkeypatch: pytest.MonkeyPatch):
    lease = "SELECT lease_until FROM sidings.origin"

    async def handler(job: Job[Ride]) -> None:
        began.append(await value(database, lease))
        if job.payload.number == 1:
            await eventually(lambda: fetch(database, lease + " WHERE lease_until > $1", began[-1]))

    began: list[datetime] = []
    registry, ride = declare(handler)
    await enqueue(database, ride, [Ride(transport="a", number=n) for n in range(3)])
    monkeypatch.setattr(sys.modules[drain.__module__], "_RENEW_SECONDS", 0.0)
    await drain(database, registry)
    assert began[0] < began[1] < began[2]


async def test_an_executor_can_take_over_right_after_a_drain(database: str):
    registry, ride = declare(lambda job: None)
    await enqueue(database, ride, [Ride(transport="a")])
    await drain(database, registry)
    assert await fetch(database, "SELECT id FROM sidings.executor") == []
    async with running(database, registry) as executor:
        assert ORIGIN in executor.held


async def test_held_jobs_and_unknown_types_are_left_alone(database: str):
    registry, _ = declare(lambda job: None)
    await value(database, f"SELECT sidings.enqueue('unknown', '{{}}', '{ORIGIN}', 'a')")
    await value(database, f"SELECT sidings.enqueue('ride', '{{}}', '{ORIGIN}', 'a')")  # behind it
    assert await drain(database, registry, until=math.inf) == []
    assert await jobs_left(database) == 2


async def test_what_is_paused_stays_with_what_stands_behind_it(database: str, admin: Admin):
    registry = Registry()

    @registry.job(group="transport")
    async def bill(job: Job[Ride]) -> None: ...

    @registry.job(group="transport")
    async def post(job: Job[Ride]) -> None: ...

    for job_type, group, origin in [(bill, "a", "t/0"), (post, "a", "t/0"), (post, "b", "t/0"), (post, "b", "t/1")]:
        await enqueue(database, job_type, [Ride(transport=group)], origin=origin)
    await enqueue(database, post, [Ride(transport="b")], origin="t/0", delay=60)
    await enqueue(database, post, [Ride(transport="c")], origin="t/2")
    await admin.pause(type="bill", reason="test")
    await admin.pause(origin="t/0", group="b", reason="test")
    await admin.pause(origin="t/2", reason="test")
    assert [(a.group, a.origin, a.after) for a in await drain(database, registry, until=math.inf)] == [("b", "t/1", 0)]
    await admin.resume(type="bill")
    assert [(a.type, a.group) for a in await drain(database, registry)] == [("bill", "a"), ("post", "a")]
    assert await jobs_left(database) == 3


async def test_a_blocked_group_waits_for_a_person_however_much_time_passes(database: str):
    async def handler(job: Job[Ride]) -> None:
        raise ValueError("broken")

    registry, ride = declare(handler, retry=Retry(stop=stop_after_attempt(1), on_exhausted="block"))
    await enqueue(database, ride, [Ride(transport="a"), Ride(transport="a")])
    assert [a.outcome for a in await drain(database, registry, until=math.inf)] == ["held"]
    assert await jobs_left(database) == 2


async def test_a_schema_of_another_name_is_drained_and_no_other(empty_database: str):
    for schema in ("depot", "sidings"):
        await migrate(empty_database, service="test", schema=schema)
    registry, ride = declare(lambda job: None, "depot")
    async with connected(empty_database) as connection, connection.transaction():
        await ride.enqueue(connection, Ride(transport="a"), origin=ORIGIN)
        await ride.enqueue(connection, Ride(transport="b"), origin=ORIGIN, delay=60)
        await connection.execute(f"SELECT sidings.enqueue('ride', '{{}}', '{ORIGIN}', 'a')")
    assert [a.group for a in await drain(empty_database, registry, until=60)] == ["a", "b"]
    assert await jobs_left(empty_database) == 1


async def test_a_service_that_does_not_run_is_drained(database: str):
    service = Service("test", postgres=database, prometheus=CollectorRegistry())
    ride = service.job(name="ride", group="transport", payload=Ride)(lambda job: None)
    await enqueue(database, ride, [Ride(transport="a")])
    assert [a.outcome for a in await drain(service)] == ["succeeded"]


async def test_handlers_use_the_transactions_of_their_service_though_it_does_not_run(database: str):
    service = Service("test", postgres=database, kafka="127.0.0.1:1", prometheus=CollectorRegistry())

    @service.job(group="transport", payload=Ride)
    async def ride(job: Job[Ride]) -> None:
        async with service.transaction() as tx:
            await service.outbox.publish(tx, "rides", key="a", value=job.payload)
            if job.payload.number:
                below = Ride(transport="a", number=job.payload.number - 1)
                await ride.enqueue(tx, below, origin=service.origin_for("a", "transports"))

    await value(database, "INSERT INTO sidings.topic (topic, partitions) VALUES ('transports', 1)")
    await enqueue(database, ride, [Ride(transport="a", number=2)], origin="t/0")
    attempts = await drain(service)
    assert [(a.origin, a.outcome) for a in attempts] == [("t/0", "succeeded"), *[(ORIGIN, "succeeded")] * 2]

    async def in_a_loop_of_its_own() -> None:
        await enqueue(database, ride, [Ride(transport="a", number=1)])
        assert [a.outcome for a in await drain(service)] == ["succeeded"] * 2

    await asyncio.to_thread(asyncio.run, in_a_loop_of_its_own())
    async with service.connected():
        await ride(Job.fake(Ride(transport="a", number=1)))
    with pytest.raises(PostgresUnavailable, match="the service is not running"):
        await ride(Job.fake(Ride(transport="a", number=1)))
    async with service:  # and it can still be started
        await ride(Job.fake(Ride()))
        assert await drain(service) != []
        await ride(Job.fake(Ride()))


# -- enqueued and fake --------------------------------------------------------------------------------------------


async def test_enqueued_gives_payloads_in_order_and_by_origin_and_group(database: str):
    _, ride = declare(lambda job: None)
    async with connected(database) as connection, connection.transaction():
        await ride.enqueue(connection, Ride(transport="late"), origin="t/0", delay=60)
        await ride.enqueue(connection, Ride(transport="a", number=1), origin="t/0")
        await ride.enqueue(connection, Ride(transport="b", number=2), origin="t/1")
        await ride.enqueue(connection, Ride(transport="a", number=3), origin="t/1")
        assert [r.transport for r in await enqueued(connection, ride)] == ["a", "b", "a", "late"]
        assert [r.number for r in await enqueued(Transaction(connection), ride, origin="t/1")] == [2, 3]
        assert [r.number for r in await enqueued(connection, ride, group="a")] == [1, 3]
        assert await enqueued(connection, ride, group=None) == []


async def test_enqueued_leaves_out_the_priorities_by_which_a_drain_runs(database: str):
    """It promised the order of the runs, and had that within a group only."""
    registry, ride = declare(lambda job: None, group=None)
    for priority in (0, 10):
        await enqueue(database, ride, [Ride(number=priority)], priority=priority)
    async with connected(database) as connection:
        assert [r.number for r in await enqueued(connection, ride)] == [0, 10]
    assert [a.payload.number for a in await drain(database, registry)] == [10, 0]


async def test_what_was_enqueued_is_seen_below_a_session_and_another_librarys_connection_is_refused(database: str):
    _, ride = declare(lambda job: None)
    engine = create_async_engine(database.replace("postgresql://", "postgresql+asyncpg://"))
    try:
        async with AsyncSession(engine) as session:
            await ride.enqueue(session, Ride(transport="a"), origin="t/0")
            below = (await (await session.connection()).get_raw_connection()).driver_connection
            assert [r.transport for r in await enqueued(cast(Any, below), ride)] == ["a"]
            for look in (enqueued(cast(Any, session), ride), advance(cast(Any, session), 1)):
                with pytest.raises(TypeError, match="AsyncSession is no connection of asyncpg"):
                    await look
    finally:
        await engine.dispose()


async def test_a_fake_job_has_what_a_handler_looks_at():
    class Payload(BaseModel):
        n: int

    job = Job.fake(Payload(n=1), group="g", attempt=3, headers={"a": "b"}, epoch=7)
    assert (job.payload.n, job.group, job.attempt, job.headers, job.fence) == (1, "g", 3, {"a": "b"}, ("fake/0", 7))
    assert datetime.now(UTC) - job.enqueued_at < timedelta(seconds=SECONDS)
    with pytest.raises(ConfigurationError, match=r"a test gives it by Job.fake\(\.\.\., tx=Transaction"):
        job.tx  # noqa: B018


async def test_what_a_handler_enqueues_that_a_test_calls_belongs_to_the_jobs_origin(database: str):
    registry = Registry()

    @registry.job(group="transport")
    async def bill(job: Job[Ride]) -> None: ...

    @registry.job(transactional=True)
    async def ride(job: Job[Ride]) -> None:
        await bill.enqueue(job.tx, job.payload)

    @registry.job(batch=2)
    async def rides(jobs: list[Job[Ride]]) -> None:
        await bill.enqueue_many(jobs.pop(0).tx, [Ride(transport="b")])

    def decorated(job: Job[Ride]) -> Awaitable[None]:
        return bill_again(job)

    async def bill_again(job: Job[Ride]) -> None:
        await bill.enqueue(job.tx, Ride(transport="c"))

    again = registry.job(name="again", payload=Ride)(decorated)

    async with connected(database) as connection, connection.transaction():
        tx = Transaction(connection)
        await ride(Job.fake(Ride(transport="a"), tx=tx, headers={"correlation_id": "c"}))
        await again(Job.fake(Ride(), origin="t/2", tx=tx))
        assert await enqueued(connection, bill, origin="t/2") == [Ride(transport="c")]
        await rides([Job.fake(Ride(), origin="t/1", tx=tx)])
        assert await enqueued(connection, bill, origin="fake/0") == [Ride(transport="a")]
        assert await enqueued(connection, bill, origin="t/1") == [Ride(transport="b")]
        headers = await connection.fetchval("SELECT headers FROM sidings.job WHERE origin = 'fake/0'")
        assert json.loads(headers) == {"correlation_id": "c"}
        for nobodys in (
            bill.enqueue(connection, Ride(transport="c")),
            ride(SimpleNamespace(tx=tx, payload=Ride(transport="c"))),
        ):
            with pytest.raises(MissingOrigin):
                await nobodys


async def test_what_a_consumers_handler_enqueues_that_a_test_calls_belongs_to_the_messages_origin(database: str):
    """It failed with `MissingOrigin`, so that a handler which enqueues without a home could not be tested so."""
    service = Service("test", postgres=database, kafka="127.0.0.1:9", prometheus=None)

    @service.job()
    async def bill(job: Job[Ride]) -> None: ...

    @service.consumer("rides")
    async def on_ride(message: Message[Ride], tx: Transaction) -> None:
        await bill.enqueue(tx, message.value)

    @service.consumer("lists", batch=10)
    async def on_rides(messages: list[Message[Ride]], tx: Transaction) -> None:
        await bill.enqueue_many(tx, [messages.pop().value])

    typed = service.topic("typed", type_header="type")

    @typed.on("Ride")
    async def on_typed(message: Message[Ride], tx: Transaction) -> None:
        await bill.enqueue(tx, message.value)

    async with connected(database) as connection, connection.transaction():
        tx = Transaction(connection)
        headers = [("correlation_id", b"c")]
        await on_ride(Message(Ride(transport="a"), topic="rides", partition=2, headers=headers), tx)
        await on_ride(tx=tx, message=Message(Ride(transport="b"), topic="rides", partition=3))
        await on_rides([Message(Ride(transport="c"), topic="lists")], tx)
        await on_typed(Message(Ride(transport="d"), topic="typed", type="Ride"), tx)
        rows = await connection.fetch("SELECT origin, payload->>'transport', headers FROM sidings.job ORDER BY id")
        assert [(origin, ride) for origin, ride, _ in rows] == [
            ("rides/2", "a"),
            ("rides/3", "b"),
            ("lists/0", "c"),
            ("typed/0", "d"),
        ]
        assert json.loads(rows[0]["headers"]) == {"correlation_id": "c"}
        for nobodys in (on_ride(Message(Ride()), tx), bill.enqueue(tx, Ride())):
            with pytest.raises(MissingOrigin):
                await nobodys


async def test_a_consumers_handler_that_a_test_calls_within_correlated_has_its_messages_origin(database: str):
    """What `correlated` says was taken for a message that was handled already, and `MissingOrigin` raised."""
    service = Service("test", postgres=database, kafka="127.0.0.1:9", prometheus=None)

    @service.job()
    async def bill(job: Job[Ride]) -> None: ...

    @service.consumer("rides")
    async def on_ride(message: Message[Ride], tx: Transaction) -> None:
        await bill.enqueue(tx, message.value)

    async with connected(database) as connection, connection.transaction():
        tx = Transaction(connection)
        ride = Message(Ride(transport="a"), topic="rides", partition=2, headers=[("correlation_id", b"its own")])
        with correlated("c-1"):
            await on_ride(ride, tx)
            await bill.enqueue(tx, Ride(), origin="rides/0")
        with working_on(Message(Ride(), topic="others", partition=5)), correlated("c-2"):
            await on_ride(ride, tx)  # by the handler of another message
        rows = await connection.fetch("SELECT origin, headers->>'correlation_id' FROM sidings.job ORDER BY id")
    assert list(map(tuple, rows)) == [("rides/2", "its own"), ("rides/0", "c-1"), ("others/5", "c-2")]


# -- the guide ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "heading",
    [
        *("A handler alone", "A consumer's handler alone", "What was enqueued", "What was published"),
        *("Running the jobs", "A home", "Time"),
    ],
)
async def test_the_examples_of_the_guide_pass(database: str, heading: str):
    defined = run("testing.md", "", heading)
    [test] = [value for name, value in defined.items() if name.startswith("test_")]
    async with connected(database) as connection:
        fixtures = {"database": database, "connection": connection}
        await test(**{name: fixtures[name] for name in test.__code__.co_varnames[: test.__code__.co_argcount]})


WRAPPED = """
called = []


@service.middleware
async def note(call, call_next):
    called.append(call.name)
    await call_next()


async def test_the_middleware_of_the_service_is_that_of_the_tests(tracker):
    await test_an_announcement_is_published(tracker)
    assert set(called) == {"announce"}
"""


async def test_the_examples_of_the_guide_pass_as_one_file(tmp_path: Path, sidings_postgres: str):
    """Also that of "A service of a module", which has a fixture of its own."""
    text = (DOCS / "testing.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "test_guide.py").write_text("\n".join([*examples, WRAPPED]))
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["sidings.devstack.fixtures"]\n')
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)),
        env=os.environ | {"SIDINGS_POSTGRES": sidings_postgres},
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert "9 passed" in said.decode(), said.decode()


async def test_policies_and_batches_are_drained_as_an_executor_runs_them(database: str):
    registry = Registry()

    @registry.job(group="transport", policy="latest")
    async def locate(job: Job[Ride]) -> None: ...

    @registry.job(group="transport", policy="parallel")
    async def notify(job: Job[Ride]) -> None: ...

    @registry.job(batch=10)
    async def post(jobs: list[Job[Ride]]) -> None: ...

    await enqueue(database, locate, [Ride(transport="b", number=3)])
    for job_type in (locate, notify, post):
        await enqueue(database, job_type, [Ride(transport="a", number=n) for n in range(3)])
    await enqueue(database, locate, [Ride(transport="b", number=4)])
    attempts = [(attempt.type, attempt.payload.number) for attempt in await drain(database, registry)]
    located = [("locate", 2), ("locate", 4)]
    assert sorted(attempts) == [*located, *(("notify", n) for n in range(3)), *(("post", n) for n in range(3))]
    assert sorted(await outcomes(database)) == ["succeeded"] * 8 + ["superseded"] * 3


async def test_a_handler_of_lists_gets_the_lists_that_an_executor_would_make(database: str):
    registry, lists = Registry(), list[list[tuple[str, str, int]]]()

    @registry.job(group="transport", batch=3, retry=Retry(wait=wait_fixed(10)))
    async def post(jobs: list[Job[Ride]]) -> list[Exception | None]:
        lists.append([(job.origin, job.payload.transport, job.attempt) for job in jobs])
        return [ValueError("broken") if job.payload.number == 1 and job.attempt == 1 else None for job in jobs]

    @registry.job(group="transport", policy="latest", batch=3)
    async def locate(jobs: list[Job[Ride]]) -> None:
        lists.append([(job.origin, job.payload.transport, job.payload.number) for job in jobs])

    await enqueue(database, post, [Ride(transport=t, number=n) for n, t in enumerate("abac")], origin="t/0")
    await enqueue(database, post, [Ride(transport="a")], origin="t/1")
    attempts = await drain(database, registry, until=10)
    assert lists == [
        [("t/0", "a", 1), ("t/0", "b", 1), ("t/0", "c", 1)],
        [("t/0", "a", 1)],
        [("t/1", "a", 1)],
        [("t/0", "b", 2)],
    ]
    assert [(a.group, a.outcome) for a in attempts[:3]] == [("a", "succeeded"), ("b", "retried"), ("c", "succeeded")]
    lists.clear()
    await enqueue(database, locate, [Ride(transport=t, number=n) for n, t in enumerate("abab")], origin="t/0")
    await drain(database, registry)
    assert lists == [[("t/0", "a", 2), ("t/0", "b", 3)]]


async def test_a_handler_of_lists_that_answers_for_too_few_has_failed(database: str):
    registry = Registry()

    @registry.job(group="transport", batch=10, retry=Retry(stop=stop_after_attempt(1)))
    async def post(jobs: list[Job[Ride]]) -> list[None]:
        return [None]  # right for a single job only

    await enqueue(database, post, [Ride(transport=t) for t in "ab"])
    assert [a.outcome for a in await drain(database, registry)] == ["discarded"] * 2


async def test_a_parallel_job_neither_waits_for_its_group_nor_holds_it_up(database: str):
    registry, again = Registry(), Retry(wait=wait_fixed(3600))

    @registry.job(group="transport", retry=again)
    async def ride(job: Job[Ride]) -> None:
        if job.payload.number == 1:
            raise ValueError("broken")

    @registry.job(group="transport", policy="parallel", retry=again)
    async def notify(job: Job[Ride]) -> None:
        if job.payload.number == 0:
            raise ValueError("broken")

    for number, job_type in enumerate([notify, ride, notify, ride]):
        await enqueue(database, job_type, [Ride(transport="a", number=number)], priority=int(number == 1))
    assert [a.payload.number for a in await drain(database, registry)] == [1, 0, 2]


async def test_types_without_a_history_leave_none(database: str):
    registry = Registry()

    @registry.job(group="transport", policy="latest", history=False)
    async def locate(job: Job[Ride]) -> None: ...

    for delay in (0, 60):
        await enqueue(database, locate, [Ride(transport="a", number=n) for n in range(2)], delay=delay)
    await enqueue(database, locate, [Ride(transport="b", number=n) for n in range(2, 4)])
    assert {a.payload.number for a in await drain(database, registry, until=60)} >= {1, 3}
    assert await jobs_left(database) == 0
    assert await history(database) == []
