"""A Postgres server whose clock was ahead, and has been set back: the ticks that it has settled lie in the future."""

import logging
from datetime import UTC, datetime, timedelta

import pytest

from .support import ORIGIN, connected, eventually, running
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
