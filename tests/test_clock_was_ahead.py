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
