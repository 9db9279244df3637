"""The analysis of a history on Spark: from the database to all tables and the page."""

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, date, datetime, timedelta
from multiprocessing import get_context
from pathlib import Path

import asyncpg
from sidings import devstack
from sidings.schema import migrate

from ..meter import cpu_with_children
from ..results import Figures
from ..suite import Bench, Compare, Size, Variant, scenario

__all__: list[str] = []

DAYS = 10
FOLDER = Path(__file__).resolve().parents[1]


async def _prepare(dsn: str) -> None:
    await migrate(dsn, service="bench")


async def _fill(dsn: str, rows: int) -> date:
    """Attempts of `DAYS` days, the same ones of other jobs each day. Returns the day after."""
    last = datetime.now(UTC).date() - timedelta(days=1)
    connection = await asyncpg.connect(dsn, command_timeout=1_800)
    try:
        for n in range(DAYS):
            await connection.execute("SELECT sidings.make_history_day($1)", last - timedelta(days=n))
        await connection.execute((FOLDER / "history_rows.sql").read_text(), rows // DAYS, last)
        for n in range(1, DAYS):
            await connection.execute((FOLDER / "history_days.sql").read_text(), last, n, n * rows)
    finally:
        await connection.close()
    return last + timedelta(days=1)


async def _measured(bench: Bench, rows: int) -> Figures:
    dsn = await bench.server.fresh("history", _prepare)
    until = await _fill(dsn, rows)
    await bench.server.settle(dsn)
    await bench.meter.start()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # Spark ends with that process
        loop = asyncio.get_running_loop()
        seconds, cpu, found = await loop.run_in_executor(pool, _spark, dsn, until)
    reading = await bench.meter.stop()
    assert found == rows // DAYS * DAYS, (found, rows)
    return {
        "rate": rows / seconds,
        "seconds": seconds,
        "client_us": cpu / rows * 1e6,
        "postgres_us": reading.postgres_seconds / rows * 1e6,
    }


def _spark(dsn: str, until: date) -> tuple[float, float, int]:
    """In a process of its own: seconds, those of CPU, and the attempts that the tables know of."""
    import pandas as pd
    from sidings.spark_analytics.history.__main__ import main

    os.environ |= {"SIDINGS_SPARK_JARS": ",".join(map(str, devstack.spark_jars())), "SPARK_LOCAL_IP": "127.0.0.1"}
    began, used = time.perf_counter(), cpu_with_children()
    with tempfile.TemporaryDirectory(prefix="sidings-bench-") as folder:
        out = Path(folder) / "out"
        window = ["--from", str(until - timedelta(days=DAYS)), "--to", str(until)]
        if main(["--postgres", dsn, *window, "--out", str(out)]) != 0:
            raise RuntimeError("the analysis has failed; what it said stands above")
        seconds = time.perf_counter() - began
        return seconds, cpu_with_children() - used, int(pd.read_parquet(out / "types.parquet")["attempts"].sum())


@scenario(
    "history",
    "The analysis of a history of ten days, all tables and the page, on Spark with all cores",
    compare=[
        Compare("10M", key="seconds", target=120.0, at_most=True),
        Compare("10M", "1M", key="client_us"),
    ],
    note="Attempts of eight types, 24 origins and as many groups as a hundredth of the rows; every fortieth "
    "failed once. From the start of the command to its end, with the start of Spark; CPU of the client is that of "
    "Python and of the JVM.",
    spark=True,
)
def history(size: Size) -> Sequence[Variant]:
    once = {"repetitions": 1}
    sizes = [("1M", 1_000_000)] + ([("10M", 10_000_000)] if size.long else [])
    if not size.long and size.scale < 1:
        sizes = [("small", size.jobs(500_000, 2_000))]
    return [Variant(name, lambda b, rows=rows: _measured(b, rows), {"rows": rows}, **once) for name, rows in sizes]
