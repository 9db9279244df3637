"""What the slow work in the background sees of the jobs that wait, on a real Postgres."""

import asyncio
import logging
import math
from collections.abc import Callable
from itertools import pairwise

import asyncpg
import pytest
from prometheus_client import CollectorRegistry
from sidings import Admin
from sidings.errors import PostgresUnavailable
from sidings.executor import ExecutorMetrics, ExecutorSettings, PostgresSettings
from sidings.executor import upkeep as upkeep_module
from sidings.executor.link import Link
from sidings.executor.queues import NOTHING_PAUSED, OriginQueue
from sidings.executor.scheduler import Scheduler
from sidings.executor.upkeep import Upkeep
from sidings.jobs import Job, Registry
from sidings.schema import load_sql

from .admin_support import a_holder, a_job
from .cli_support import cli
from .faulty_proxy import proxied
from .support import ORIGIN, a_role, connected, eventually, fetch, running

STORE = """
INSERT INTO sidings.job (type, origin, payload, position, enqueued_at)
VALUES ('x', $1, '{}', CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('sidings.job_position') END,
        clock_timestamp() - $2 * interval '1 second')
"""


def an_upkeep(
    link: Link, scheduler: Scheduler, on_found: Callable[[OriginQueue], None] = lambda _: None, **settings: float
) -> Upkeep:
    return Upkeep(
        link,
        scheduler,
        ExecutorMetrics("test", CollectorRegistry()),
        ExecutorSettings.model_validate(settings),
        schema="sidings",
        on_found=on_found,
    )


async def _store(connection: asyncpg.Connection, position: int, age: int) -> None:
    await connection.execute(
        "INSERT INTO sidings.job (type, origin, payload, position, enqueued_at) "
        "VALUES ('x', $1, '{}', $2, clock_timestamp() - $3 * interval '1 second')",
        ORIGIN,
        position,
        age,
    )


async def test_a_look_at_ages_begins_where_the_last_one_found_something(database: str, monkeypatch):
    link, scheduler = Link(PostgresSettings(dsn=database)), Scheduler(lambda kind: True)
    queue = scheduler.add_origin(ORIGIN, 1)
    queue.high = 100
    upkeep = an_upkeep(link, scheduler)
    connection = await asyncpg.connect(database)

    async def look() -> float:
        await upkeep._look_at_ages()
        return upkeep.oldest[ORIGIN]

    assert await look() == 0.0
    await _store(connection, 90, 200)  # of a transaction that commits late
    await _store(connection, 110, 100)
    await _store(connection, 120, 50)
    assert await look() == pytest.approx(100, abs=10)
    queue.high = 130
    await look()
    await connection.execute("DELETE FROM sidings.job WHERE position = 110")
    assert await look() == pytest.approx(50, abs=10)
    await _store(connection, 111, 150)
    assert await look() == pytest.approx(50, abs=10)
    monkeypatch.setattr(scheduler, "knows_type", lambda kind: False)  # so the audit has nothing to say of them
    assert await upkeep.audit() == 0  # from then on a look begins at the front again
    assert await look() == pytest.approx(200, abs=10)
    before, fetch = queue.first, link.fetch

    async def read_late(*args: object) -> list[asyncpg.Record]:
        found = await fetch(*args)  # type: ignore[arg-type]
        queue.first = 85  # where a read finds a job meanwhile
        return found

    async def fail(*args: object) -> list[asyncpg.Record]:
        raise PostgresUnavailable("away")

    monkeypatch.setattr(link, "fetch", fail)
    with pytest.raises(PostgresUnavailable):
        await look()
    assert queue.first == before < queue.high, "a look that fails has seen nothing"
    monkeypatch.setattr(link, "fetch", read_late)
    await look()
    assert queue.first == 85

    async def lose_it(*args: object) -> list[asyncpg.Record]:
        scheduler.remove_origin(ORIGIN)
        return await fetch(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(link, "fetch", lose_it)
    await look()
    assert scheduler.origins == {}
    await connection.close()
    await link.close()


async def test_the_audit_looks_behind_its_first_page_and_misses_nothing_that_a_person_has_paused(
    database: str, monkeypatch
):
    monkeypatch.setattr(upkeep_module, "_PAGE", 2)
    monkeypatch.setattr(upkeep_module, "_SECOND_LOOK_SECONDS", 0.0)
    link, scheduler = Link(PostgresSettings(dsn=database)), Scheduler(lambda kind: True)
    scheduler.add_origin(ORIGIN, 1).high = 100
    found: list[OriginQueue] = []
    upkeep = an_upkeep(link, scheduler, on_found=found.append)
    async with connected(database) as connection:
        for position in (1, 2, 3, 4, 5, 101):  # the last one has still to be read
            await _store(connection, position, 0)
    assert await upkeep.audit() == 5
    assert len(found) == 1, "the origin is read anew"
    scheduler.pauses = ({"x"}, set(), set())
    assert await upkeep.audit() == 0
    scheduler.pauses, unaccounted = NOTHING_PAUSED, upkeep._unaccounted

    async def and_one_ends(queue: OriginQueue) -> set[int]:
        found = await unaccounted(queue)
        async with connected(database) as connection:
            await connection.execute("DELETE FROM sidings.job WHERE position = 3")
        scheduler.add_origin("another/0", 1)  # acquired meanwhile: it has its turn another time
        return found

    monkeypatch.setattr(upkeep, "_unaccounted", and_one_ends)
    assert await upkeep.audit() == 4, "it looks twice: what is on its way is not missed"
    await link.close()


async def test_a_look_at_ages_sees_a_job_whose_transaction_commits_late(database: str):
    async with (
        running(database, Registry()) as executor,
        connected(database) as early,
        connected(database) as later,
    ):
        queue = executor.scheduler.origins[ORIGIN]
        # Its own look at the start would share the connection with those below.
        await eventually(lambda: executor._upkeep.oldest, "the first look")
        transaction = early.transaction()
        await transaction.start()
        await early.execute(STORE, ORIGIN, 200)
        await later.execute(STORE, ORIGIN, 50)
        last = await later.fetchval("SELECT position FROM sidings.job")
        await eventually(lambda: queue.high >= last, "the second is read")
        await executor._upkeep._look_at_ages()
        assert executor._upkeep.oldest[ORIGIN] == pytest.approx(50, abs=10)
        await transaction.commit()
        await eventually(lambda: queue.first < last, "the first is read")
        await executor._upkeep._look_at_ages()
        assert executor._upkeep.oldest[ORIGIN] == pytest.approx(200, abs=10)


@pytest.mark.parametrize("due", ["1 minute", "-5 seconds"])
async def test_a_job_that_is_put_off_again_and_again_hides_none_that_waits_behind_it(database: str, due: str):
    """Those of its group waited for as long as it was, and those of others were not looked at either."""
    link, scheduler = Link(PostgresSettings(dsn=database)), Scheduler(lambda kind: True)
    scheduler.add_origin(ORIGIN, 1)
    upkeep = an_upkeep(link, scheduler)
    old = "clock_timestamp() - interval '2 hours'"
    await a_job(database, attempt="2", enqueued_at=old, run_at=f"clock_timestamp() + interval '{due}'")
    await upkeep._look_at_ages()
    assert upkeep.oldest[ORIGIN] == 0
    await a_job(database, enqueued_at="clock_timestamp() - interval '30 minutes'")
    await upkeep._look_at_ages()
    assert upkeep.oldest[ORIGIN] >= 1_800
    await fetch(database, "UPDATE sidings.job SET run_at = clock_timestamp() - interval '1 hour' WHERE attempt > 1")
    scheduler.origins[ORIGIN].first = 0  # as an audit leaves it
    await upkeep._look_at_ages()
    assert upkeep.oldest[ORIGIN] >= 3_600, "it hangs, or no worker is free"
    await link.close()


async def test_nor_do_ten_thousand_that_are_put_off(database: str):
    """Each look passes over so many, and the next one goes on behind them."""
    link, scheduler = Link(PostgresSettings(dsn=database)), Scheduler(lambda kind: True)
    scheduler.add_origin(ORIGIN, 1)
    upkeep = an_upkeep(link, scheduler)
    await fetch(
        database,
        """INSERT INTO sidings.job (type, origin, "group", attempt, position, run_at)
           SELECT 'x', $1, 'g' || n, 2, n, clock_timestamp() + interval '1 minute' FROM generate_series(1, 15000) n""",
        ORIGIN,
    )
    await a_job(database, position="20000", enqueued_at="clock_timestamp() - interval '30 minutes'")
    scheduler.origins[ORIGIN].high = 20_000
    await upkeep._look_at_ages()
    await upkeep._look_at_ages()
    assert upkeep.oldest[ORIGIN] >= 1_800
    await link.close()


async def test_jobs_of_an_unknown_type_are_counted_as_long_as_they_are_here(database: str):
    """They were counted for ever, and once more whenever they were read anew: the alert outlived what it asks for."""
    exposed = CollectorRegistry()

    def counted() -> float:
        return exposed.get_sample_value("sidings_unknown_jobs", {"service": "test", "type": "gone"}) or 0.0

    origins = [ORIGIN, "other/0"]
    async with (
        running(database, Registry(), origins, prometheus=exposed, audit_seconds=0.2) as executor,
        connected(database) as connection,
    ):
        store = "SELECT sidings.enqueue('gone', '{}', origin => $1, \"group\" => $2)"
        for group in ("a", "a", None):
            await connection.execute(store, ORIGIN, group)
        await connection.execute(store, "other/0", None)
        await eventually(lambda: counted() == 4)
        for queue in executor.scheduler.origins.values():
            executor._reread(queue)
        await eventually(lambda: all(queue.high for queue in executor.scheduler.origins.values()), "all is read anew")
        await eventually(lambda: counted() == 4)
        executor.assign([ORIGIN], 2)
        await eventually(lambda: counted() == 3)
        await connection.execute("DELETE FROM sidings.job")
        await eventually(lambda: counted() == 0)


async def test_jobs_of_a_type_that_is_declared_later_are_read_then_and_no_audit_misses_them(
    database: str, monkeypatch: pytest.MonkeyPatch
):
    """They waited for the audit, which called them a defect of the reader: a critical alert asked to report it."""
    monkeypatch.setattr(upkeep_module, "_SECOND_LOOK_SECONDS", 0.0)
    registry, ran = Registry(), set[int]()
    async with running(database, registry, poll_seconds=60.0) as executor, connected(database) as connection:
        store = "SELECT sidings.enqueue('late', '{}', origin => $1, \"group\" => $2)"
        ids = {await connection.fetchval(store, ORIGIN, group) for group in (None, None, "a")}
        executor.wake()
        await eventually(lambda: executor.scheduler.unknown == {"late": 3})

        @registry.job(payload=dict[str, str])
        async def late(job: Job[dict[str, str]]) -> None:
            ran.add(job.id)

        link = Link(PostgresSettings(dsn=database))
        assert await an_upkeep(link, executor.scheduler).audit() == 0
        await link.close()
        executor.wake()
        await eventually(lambda: ran == ids)
        assert executor.scheduler.unknown == {}


async def test_while_postgres_is_away_nothing_is_told_of_origins_whose_leases_have_run_out(database: str):
    """The figures of the last look were told for as long as it was away: others had long had the origins."""
    exposed = CollectorRegistry()

    def told() -> tuple[float | None, ...]:
        names = ("sidings_held_origins", "sidings_held_jobs", "sidings_blocked_jobs", "sidings_ready")
        unknown = exposed.get_sample_value("sidings_unknown_jobs", {"service": "test", "type": "nobody"})
        oldest = exposed.get_sample_value("sidings_oldest_waiting_seconds", {"service": "test", "origin": ORIGIN})
        return (oldest and 100, unknown, *(exposed.get_sample_value(name, {"service": "test"}) for name in names))

    for state in ("held", "blocked"):
        await a_job(database, state, first_started_at="now() - interval '100 s'")
    registry = Registry()

    @registry.job(payload=object)
    async def idle(job: Job[object]) -> None: ...

    async with (
        proxied(database) as proxy,
        running(proxy.dsn, registry, prometheus=exposed, lease_seconds=1.0, audit_seconds=0.2) as executor,
    ):
        executor.cycles.paused = True  # what could run stays where it is
        for kind in ("idle", "nobody"):
            await fetch(database, f"SELECT sidings.enqueue('{kind}', '{{}}', origin => '{ORIGIN}')")
        executor.wake()
        await eventually(lambda: told() == (100, 1, 1, 1, 1, 1), told)
        proxy.cut()
        await eventually(lambda: told() == (None, None, 0, 0, 0, 0), told)
        proxy.heal()
        await eventually(lambda: told() == (100, 1, 1, 1, 1, 1), told)


async def test_an_audit_that_takes_long_lets_the_others_have_their_turns(database: str, monkeypatch):
    """Of thousands of origins, or of a long backlog, it takes a minute and more, and what /metrics says of ages, held
    jobs and orphans stood still meanwhile."""
    monkeypatch.setattr(upkeep_module, "_PAGE", 1)
    monkeypatch.setattr(upkeep_module, "_AGES_SECONDS", 0.02)
    link, scheduler = Link(PostgresSettings(dsn=database)), Scheduler(lambda kind: False)
    scheduler.add_origin(ORIGIN, 1).high = 1_000
    upkeep = an_upkeep(link, scheduler, audit_seconds=0.1)
    async with connected(database) as connection:
        for position in range(1, 101):
            await _store(connection, position, 0)
    sent: list[str] = []
    fetch = link.fetch

    async def note(query: str, *args: object) -> list[asyncpg.Record]:
        sent.append(query)
        return await fetch(query, *args)

    monkeypatch.setattr(link, "fetch", note)
    upkeeping = asyncio.create_task(upkeep.run())
    await eventually(lambda: sent.count(upkeep._audit_sql) >= 100, "an audit, page by page")
    upkeeping.cancel()
    begun = sent.index(upkeep._audit_sql)
    assert sent[begun : begun + 100].count(upkeep._ages_sql) > 1
    await link.close()


async def test_an_audit_takes_little_of_the_time_of_postgres(database: str, monkeypatch):
    """Of millions of paused jobs it took minutes, and was due again at once: half a core for each instance."""
    monkeypatch.setattr(upkeep_module, "_PAGE", 1)
    link, scheduler = Link(PostgresSettings(dsn=database)), Scheduler(lambda kind: False)
    scheduler.add_origin(ORIGIN, 1).high = 100
    upkeep = an_upkeep(link, scheduler)
    async with connected(database) as connection:
        for position in range(1, 6):
            await _store(connection, position, 0)
    loop, pages, fetch = asyncio.get_running_loop(), list[tuple[float, float]](), link.fetch

    async def slow(query: str, *args: object) -> list[asyncpg.Record]:
        began = loop.time()
        await fetch("SELECT pg_sleep(0.01)")
        rows = await fetch(query, *args)
        pages.append((began, loop.time()))
        return rows

    monkeypatch.setattr(link, "fetch", slow)
    assert await upkeep.audit() == 0
    assert len(pages) == 6
    assert all(following - end > min(10 * (end - began), 4) for (began, end), (following, _) in pairwise(pages))
    await link.close()


async def test_what_took_longer_than_its_turns_are_apart_is_not_due_again_at_once(database: str):
    upkeep = an_upkeep(Link(PostgresSettings(dsn=database)), Scheduler(lambda kind: True))
    task = upkeep_module._Task(lambda: asyncio.sleep(0.2), 0.1, 0.0, "the reader could not be audited")
    await upkeep._do_what_is_due([task])
    assert task.at > asyncio.get_running_loop().time()


async def test_what_waits_for_a_person_and_cannot_be_counted_in_time_is_given_more(database: str):
    """As of tens of millions: nothing told that jobs wait for a person, nor how long others have waited."""
    async with a_role(database) as (role, of_role), connected(database) as admin:
        await admin.execute(
            "INSERT INTO sidings.job (type, origin, payload, held, position) "
            f"SELECT 'x', '{ORIGIN}', '{{}}', 'x', NULL FROM generate_series(1, 500); "
            "CREATE FUNCTION public.is_there() RETURNS boolean VOLATILE LANGUAGE plpgsql AS "
            "$$BEGIN PERFORM pg_sleep(0.001); RETURN true; END$$; "
            f"CREATE POLICY slow ON sidings.job TO {role} USING (public.is_there()); "
            "ALTER TABLE sidings.job ENABLE ROW LEVEL SECURITY"
        )
        await _store(admin, 1, 100)
        link, scheduler = Link(PostgresSettings(dsn=of_role, call_seconds=0.3)), Scheduler(lambda kind: True)
        scheduler.add_origin(ORIGIN, 1)
        upkeep = an_upkeep(link, scheduler)
        upkeeping = asyncio.create_task(upkeep.run())
        try:
            await eventually(lambda: upkeep.held == 500 and upkeep.oldest.get(ORIGIN), lambda: link.patience)
        finally:
            upkeeping.cancel()
            await link.close()


async def test_what_takes_long_to_count_is_counted_more_seldom(database: str, monkeypatch):
    """Millions of held jobs take seconds, of each instance: Postgres did little else."""
    monkeypatch.setattr(upkeep_module, "_AGES_SECONDS", 0.02)
    monkeypatch.setattr("sidings.executor.link._REST", 1e6)
    link, scheduler = Link(PostgresSettings(dsn=database)), Scheduler(lambda kind: True)
    scheduler.add_origin(ORIGIN, 1)
    upkeep = an_upkeep(link, scheduler)
    sent: list[str] = []
    fetch = link.fetch

    async def note(query: str, *args: object) -> list[asyncpg.Record]:
        sent.append(query)
        return await fetch(query, *args)

    monkeypatch.setattr(link, "fetch", note)
    upkeeping = asyncio.create_task(upkeep.run())
    await eventually(lambda: sent.count(upkeep._ages_sql) > 5)
    upkeeping.cancel()
    assert sum("held IS NOT NULL" in query and "AS held" in query for query in sent) == 1
    await link.close()


async def test_what_took_long_for_want_of_postgres_has_its_next_turn_within_minutes(monkeypatch: pytest.MonkeyPatch):
    """After half an hour's figures of before the outage nobody would have known who waits for a person."""

    async def count() -> None:
        await asyncio.sleep(0.001)
        raise PostgresUnavailable("it hangs")

    monkeypatch.setattr("sidings.executor.link._REST", 1e9)
    task = upkeep_module._Task(count, 5.0, 0.0, "what waits could not be counted", rests=True)
    assert await task.turn() == 300.0
    seldom = upkeep_module._Task(count, 3_600.0, 0.0, "the history could not be maintained")
    assert await seldom.turn() == 60.0, "not in an hour"


async def test_an_origin_that_nobody_holds_is_named_once_and_counted(database: str, caplog):
    registry = CollectorRegistry()
    async with (
        running(database, Registry(), [ORIGIN, "y/0"], prometheus=registry) as executor,
        connected(database) as connection,
    ):
        link = Link(PostgresSettings(dsn=database))  # the executor's own is in use
        upkeep = Upkeep(
            link,
            executor.scheduler,
            ExecutorMetrics("test", CollectorRegistry()),
            ExecutorSettings(),
            schema="sidings",
            on_found=lambda queue: None,
        )
        for origin, age in [("a/0", 100), (ORIGIN, 100), (ORIGIN + "0", 100), (ORIGIN + "1", 100), ("z/0", 5)]:
            await connection.execute(STORE, origin, age)
        await upkeep.look_for_orphans()
        assert upkeep.orphans == [], "its owner may just be about to change"
        await upkeep.look_for_orphans()
        await upkeep.look_for_orphans()
        assert upkeep.orphans == ["a/0", ORIGIN + "0"], "of two neighbours the first; z/0 is young"
        [told] = [record.message for record in caplog.records if "nobody holds" in record.message]
        assert told == (
            f"nobody holds a/0, {ORIGIN}0, where jobs wait or are held: consume the topic, name it in topics=, move "
            "the jobs, or end them, as by `sidings jobs discard --origin ORIGIN --state held` (docs/administration.md)"
        )
        executor._upkeep.orphans = upkeep.orphans
        assert registry.get_sample_value("sidings_orphaned_origins", {"service": "test"}) == 2
        await connection.execute("DELETE FROM sidings.job WHERE origin <> $1", ORIGIN)
        await upkeep.look_for_orphans()
        assert upkeep.orphans == []
        await link.close()


async def test_delayed_jobs_that_are_due_where_nobody_holds_their_origin_are_orphans(database: str):
    """Nobody promotes them. Where no other job waited there they stood still in silence."""
    link = Link(PostgresSettings(dsn=database))
    orphans = load_sql("sidings.executor", "orphans", "sidings")
    due, later = {"run_at": "now() - interval '100 s'"}, {"run_at": "now() + interval '1 hour'"}
    await a_holder(database, ORIGIN, "y/0")
    for origin, delay in [
        ("a/0", later), ("a/1", due), ("a/2", due),  # two of one gap: the first that is due counts
        (ORIGIN, due), ("u/0", later), ("v/0", {"run_at": "now() - interval '5 s'"}), ("y/0", due),
        ("z/0", later), ("z/1", due), ("z/2", {"run_at": "'infinity'"}),
    ]:  # fmt: skip
        await a_job(database, "delayed", origin=origin, **delay)
    assert [row["origin"] for row in await link.fetch(orphans, 60.0)] == ["a/1", "z/1"]
    await a_job(database, origin="z/1", enqueued_at="now() - interval '100 s'")
    assert [row["origin"] for row in await link.fetch(orphans, 60.0)] == ["a/1", "z/1"]
    await link.close()


async def test_jobs_in_a_slot_of_the_outbox_are_orphans(database: str, admin: Admin):
    """As SQL may have stored them: a relay has it leased, and runs none. They stood still in silence."""
    link = Link(PostgresSettings(dsn=database))
    await a_holder(database, ORIGIN, "outbox/3")
    await a_job(database, origin="outbox/3", enqueued_at="now() - interval '100 s'")
    orphans = load_sql("sidings.executor", "orphans", "sidings")
    assert [row["origin"] for row in await link.fetch(orphans, 60.0)] == ["outbox/3"]
    assert [orphan.origin for orphan in await admin.orphans()] == ["outbox/3"]
    await link.close()


async def test_held_jobs_make_an_orphan_where_nobody_holds_their_origin(database: str):
    """No executor counts them any more: the alert on held jobs resolved, and no other came."""
    link = Link(PostgresSettings(dsn=database))
    orphans = load_sql("sidings.executor", "orphans", "sidings")
    await a_holder(database, "b/0", "y/0")
    await a_holder(database, "d/0", lease="-1 second")
    old = {"enqueued_at": "now() - interval '100 s'"}
    for origin in ("a/0", "b/0", "d/0", "e/0", "z/0"):
        await a_job(database, "held", origin=origin, **old)
    assert [row["origin"] for row in await link.fetch(orphans, 60.0)] == ["a/0", "d/0", "z/0"]
    await a_job(database, origin="e/0", **old)
    assert [row["origin"] for row in await link.fetch(orphans, 60.0)] == ["a/0", "d/0", "e/0", "z/0"]
    for origin in ("a/0", "e/0"):
        await cli(database, "jobs", "discard", "--origin", origin, "--state", "held", "--yes")
    assert [row["origin"] for row in await link.fetch(orphans, 60.0)] == ["d/0", "e/0", "z/0"], "as the log says"
    await link.close()


async def test_what_waits_for_its_time_makes_no_orphan_and_hides_none(database: str):
    """However old it is; nor does a held job that has just come. An origin whose holder has died is one."""
    link = Link(PostgresSettings(dsn=database))
    orphans = load_sql("sidings.executor", "orphans", "sidings")
    old, later = {"enqueued_at": "now() - interval '100 s'"}, {"run_at": "now() + interval '1 hour'"}
    await a_holder(database, "b/0", "f/0")
    await a_holder(database, "d/0", lease="-1 second")
    for origin in ("a/0", "c/0", "g/0"):
        await a_job(database, "delayed", origin=origin, **later, **old)
        await a_job(database, "held", origin=origin, run_at="now() - interval '100 s'")
    for origin in ("b/0", "d/0", "f/0"):
        await a_job(database, origin=origin, **old)
    assert [row["origin"] for row in await link.fetch(orphans, 60.0)] == ["d/0"]
    await link.close()


async def test_orphans_are_looked_for(database: str, monkeypatch):
    monkeypatch.setattr(upkeep_module, "_ORPHANS_SECONDS", 0.1)
    async with running(database, Registry()) as executor, connected(database) as connection:
        await connection.execute(STORE, "a/0", 100)
        await eventually(lambda: executor._upkeep.orphans == ["a/0"], "it is found")


async def test_while_postgres_is_away_no_orphans_are_told_of(database: str, monkeypatch):
    """An instance that was cut off told for ever of those of its last look, and the alert stayed."""
    monkeypatch.setattr(upkeep_module, "_ORPHANS_SECONDS", 0.1)
    registry = CollectorRegistry()

    def told() -> float | None:
        return registry.get_sample_value("sidings_orphaned_origins", {"service": "test"})

    async with proxied(database) as proxy, running(proxy.dsn, Registry(), prometheus=registry):
        await fetch(database, STORE, "a/0", 100)
        await eventually(lambda: told() == 1, told)
        proxy.cut()
        await eventually(lambda: math.isnan(told() or 0), told)
        proxy.heal()
        await eventually(lambda: told() == 1, told)


async def test_a_task_that_fails_for_long_is_told_of_once_and_keeps_no_other_waiting(database, caplog, monkeypatch):
    """One that Postgres refuses was told of at each try; one that works made the log say that all did."""
    monkeypatch.setattr(upkeep_module, "_ARCHIVE_SECONDS", 0.02)
    monkeypatch.setattr(upkeep_module, "_AGES_SECONDS", 0.02)
    caplog.set_level(logging.DEBUG, "sidings")

    def lines(lowest: int) -> list[str]:
        found = [one for one in caplog.records if one.levelno >= lowest]
        return [text for one in found if (text := one.getMessage()).startswith("what is not archived could not be")]

    async def audit(_: Upkeep) -> None:
        pytest.fail("its turn is in minutes")

    monkeypatch.setattr(Upkeep, "audit", audit)
    async with connected(database) as connection, running(database, Registry()) as executor:
        await connection.execute("ALTER FUNCTION sidings.history_archived(date) RENAME TO elsewhere")
        await eventually(lambda: len(lines(logging.DEBUG)) > 3)
        await connection.execute(STORE, ORIGIN, 100)
        await eventually(lambda: executor._upkeep.oldest.get(ORIGIN), "the others have their turns")
        more = len(lines(logging.DEBUG)) + 3
        await eventually(lambda: len(lines(logging.DEBUG)) > more)
        [told] = lines(logging.WARNING)
        assert "trying again: function sidings.history_archived(date) does not exist" in told
        await connection.execute("ALTER FUNCTION sidings.elsewhere(date) RENAME TO history_archived")
        await eventually(lambda: "and works again" in lines(logging.WARNING)[-1])


async def test_what_cannot_be_dropped_is_told_of_also_where_maintenance_fails(database: str, caplog):
    """Just then somebody looks for the reason."""
    async with connected(database) as connection:
        await connection.execute("SELECT sidings.make_history_day('2020-01-01')")
        await connection.execute("ALTER FUNCTION sidings.maintain(integer) RENAME TO elsewhere")
        async with running(database, Registry()):
            await eventually(lambda: "1 days of the history, from 2020-01-01 on" in caplog.text)
            await eventually(lambda: "the history could not be maintained, trying again" in caplog.text)


async def test_what_retention_cannot_drop_is_told_of(database: str, caplog, monkeypatch):
    """Only the log of Postgres told of it, which most who operate a service never see."""
    async with connected(database) as connection:
        await connection.execute(
            """SELECT sidings.make_history_day(day) FROM unnest('{2020-01-01,2020-01-02}'::date[]) day;
               CREATE VIEW report AS SELECT count(*) FROM sidings.job_history_20200101"""
        )
        async with connection.transaction():  # one now() for all of it
            last = "(now() AT TIME ZONE 'UTC')::date - 31"  # it had to go less than a day ago
            await connection.execute(f"SELECT sidings.make_history_day({last} - n) FROM generate_series(0, 1) n")
            overdue = load_sql("sidings.executor", "overdue")
            row = await connection.fetchrow(overdue, 30)
            assert row is not None
            assert (row["days"], str(row["first"]), row["gathered"]) == (3, "2020-01-01", 0)
            await connection.execute(
                """INSERT INTO sidings.job_history
                       (job_id, enqueued_at, finished_at, attempt, outcome, priority, type, origin)
                   VALUES (1, '2019-01-01', '2019-01-01', 1, 'lost', 0, 'ride', 'rides/0')"""
            )
            assert (await connection.fetchrow(overdue, 30) or {})["gathered"] > 0
            await connection.execute("UPDATE sidings.service SET archive_history = true")
            assert await connection.fetchval(overdue, 30) == 0, "what is not archived yet has to wait"
            await connection.execute("UPDATE sidings.service SET archive_history = false")
        monkeypatch.setattr(upkeep_module, "_MOST_GATHERED", -1)
        async with running(database, Registry()):
            await eventually(lambda: "holds 0 MB" in caplog.text)
        assert "1 days of the history, from 2020-01-01 on, are over history_days=30 and cannot be" in caplog.text
        monkeypatch.undo()
        caplog.clear()
        await connection.execute("DROP VIEW report; SELECT sidings.maintain(30)")
        link = Link(PostgresSettings(dsn=database))
        upkeep = Upkeep(
            link,
            Scheduler(lambda kind: True),
            ExecutorMetrics("test", CollectorRegistry()),
            ExecutorSettings(),
            schema="sidings",
            on_found=lambda queue: None,
        )
        await upkeep.look_at_history()
        await link.close()
        assert caplog.text == ""
