"""A Postgres server whose clock is ahead of the instances', or was: the ticks that it has settled lie in the future."""

import asyncio
import logging
from datetime import UTC, date, datetime, timedelta

import pytest
from sidings.executor import PostgresSettings, periodic, upkeep
from sidings.kafka import seen
from sidings.schema import load_sql

from .support import ORIGIN, connected, eventually, fetch, running, value
from .test_periodic_jobs import Ticks, remember


@pytest.mark.parametrize("per", ["service", "origin"])
async def test_a_periodic_job_does_not_stop_for_years_without_a_word(database: str, per: str, caplog) -> None:
    caplog.set_level(logging.ERROR, "sidings.periodic")
    ticks = Ticks()
    ticks.declare("it's", every=0.2, per=per)
    ahead = datetime.now(UTC) + timedelta(days=400)
    await remember(database, "it's", "every 0.2 s", ahead, ORIGIN if per == "origin" else "")

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if "no tick comes before" in record.getMessage()]

    async with running(database, ticks.registry):
        await eventually(told)
    assert ticks.jobs == {}
    async with connected(database) as connection:
        await connection.execute(told()[0].partition("begin now: ")[2])
    async with running(database, ticks.registry):
        await ticks.ran("it's", 2)


async def test_what_lets_them_begin_settles_no_tick_of_another_origin(database: str, caplog) -> None:
    """An origin that has not fired yet, and whose first tick is due, as of a partition that nobody has held since: its
    last_tick, which was null, became now, and the tick was gone."""
    caplog.set_level(logging.ERROR, "sidings.periodic")
    ticks = Ticks()
    ticks.declare("daily", every=86_400.0, per="origin")
    await remember(database, "daily", "every 86400 s", datetime.now(UTC) + timedelta(days=400), ORIGIN)
    await remember(database, "daily", "every 86400 s", None, "other/0")

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if "no tick comes before" in record.getMessage()]

    async with connected(database) as connection:
        async with running(database, ticks.registry):
            await eventually(told)
        await connection.execute(told()[0].partition("begin now: ")[2])
        rows = await connection.fetch("SELECT origin, last_tick FROM sidings.periodic WHERE name = 'daily'")
        assert {row["origin"]: row["last_tick"] is None for row in rows} == {ORIGIN: False, "other/0": True}
        assert not await connection.fetchval(
            "SELECT count(*) FROM sidings.periodic WHERE greatest(since, last_tick) > now()"
        )


DAYS_AHEAD = 60


class Behind(datetime):
    """The clock of an instance, behind the server's; that is all that the two can tell of each other."""

    @classmethod
    def now(cls, tz=None):
        return datetime.now(tz) - timedelta(days=DAYS_AHEAD)


async def days(dsn: str, table: str) -> set[date]:
    # One that is dropped meanwhile is not there; as a regclass it would be told by its number.
    query = "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = $1::regclass"
    rows = await fetch(dsn, query, table)
    names = [row[0].rpartition("_")[2] for row in rows]
    return {datetime.strptime(name, "%Y%m%d").replace(tzinfo=UTC).date() for name in names if name.isdigit()}


async def test_it_drops_no_history_and_no_ids_before_their_time(database: str, monkeypatch: pytest.MonkeyPatch):
    """A server that is days ahead for a moment: all was dropped, and repeats of messages were handled again."""
    for module in (periodic, upkeep, seen):
        monkeypatch.setattr(module, "datetime", Behind)
    monkeypatch.setattr(periodic, "_PRUNE_SECONDS", 0.1)
    today = await value(database, "SELECT (now() AT TIME ZONE 'UTC')::date")
    young, old = (today - timedelta(days=DAYS_AHEAD + ago) for ago in (3, 9))
    for day in (young, old):
        await value(database, "SELECT sidings.make_history_day($1)", day)
        await value(database, "SELECT sidings.make_seen_day($1)", day)
    for name, day in (("young", young), ("old", old)):
        query = "INSERT INTO sidings.periodic (name, origin, schedule, seen_at) VALUES ($1, '', 'x', $2) RETURNING 1"
        await value(database, query, name, datetime.combine(day, datetime.min.time(), UTC))
    ids = asyncio.create_task(seen.SeenUpkeep(PostgresSettings(dsn=database), 7).run())
    ticks = Ticks()
    ticks.declare("daily", every=86_400.0)
    try:
        async with running(database, ticks.registry, history_days=7):
            for table in ("sidings.job_history", "sidings.message_seen"):

                async def dropped(table: str = table) -> bool:
                    return old not in await days(database, table)

                await eventually(dropped)
                assert {young, today} <= await days(database, table)

            async def pruned() -> bool:
                return not await value(database, "SELECT count(*) FROM sidings.periodic WHERE name = 'old'")

            await eventually(pruned)
            assert await value(database, "SELECT count(*) FROM sidings.periodic WHERE name = 'young'")
    finally:
        ids.cancel()


async def test_an_instance_that_is_days_ahead_drops_nothing_before_its_time_either(database: str):
    """Not what it takes for old itself: the server knows better."""
    today = await value(database, "SELECT (now() AT TIME ZONE 'UTC')::date")
    young, ahead = today - timedelta(days=3), today + timedelta(days=30)
    await value(database, "SELECT sidings.make_history_day($1)", young)
    await value(database, "SELECT sidings.make_seen_day($1)", young)
    await fetch(database, "INSERT INTO sidings.periodic (name, origin, schedule) VALUES ('young', '', 'x')")
    await fetch(database, load_sql("sidings.executor", "maintain"), 7, ahead)
    await fetch(database, load_sql("sidings.kafka", "maintain_seen"), 7, ahead)
    its_now = datetime.combine(ahead, datetime.min.time(), UTC)
    await fetch(database, load_sql("sidings.executor", "prune_periodic"), its_now)
    for table in ("sidings.job_history", "sidings.message_seen"):
        assert {young, today} <= await days(database, table)
    assert await value(database, "SELECT count(*) FROM sidings.periodic") == 1
