"""Postgres, or the way there, goes away while Spark reads; and what else Spark's connections are told."""

import asyncio
import re
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from sidings.errors import ConfigurationError
from sidings.schema import load_sql
from sidings.spark_analytics.history import Selection, reading
from sidings.spark_analytics.history.dsn import jdbc
from sidings.spark_analytics.history.reading import _transaction

from .faulty_proxy import Moment, proxied
from .guide import DOCS
from .history_support import stored
from .support import SECONDS
from .test_history_archive import OLD, an_attempt

pytestmark = pytest.mark.timeout(600)  # Spark starts
READING = sys.modules[_transaction.__module__]  # the package's `reading` is the function
DSN = sys.modules[jdbc.__module__]
WINDOW = Selection(OLD, OLD + timedelta(hours=1))


def test_what_the_driver_knows_by_capitals_stands_in_the_url():
    source = jdbc("postgresql://u:hush@localhost/db?application_name=a%26b+c&gssencmode=disable&sslmode=require")
    assert source.url == (
        "jdbc:postgresql://localhost/db?tcpKeepAlive=true&socketTimeout=600&ApplicationName=a%26b%20c&gssEncMode=disable"
    )
    assert source.properties == {
        "user": "u", "password": "hush", "driver": "org.postgresql.Driver", "sslmode": "require"
    }  # fmt: skip


def test_the_guide_names_the_dsns_parameters_that_jdbc_takes():
    """It told of `passfile=` for all, and nowhere that an analysis refuses it."""
    [text] = re.findall(r"JDBC takes (`.+?`)\. Others", (DOCS / "history.md").read_text(), re.DOTALL)
    listed = set(re.findall(r"`(\w+)`", text))
    assert listed == DSN._SAME | DSN._RENAMED.keys() | {"host", "password", "target_session_attrs", "user"}
    for name in sorted(listed - {"host"}):
        jdbc(f"postgresql://u@localhost/db?{name}={'primary' if name == 'target_session_attrs' else 'x'}")
    jdbc("postgresql:///db?user=u&host=localhost")
    for other in ("passfile=/run/secrets/pgpass", "statement_timeout=0"):
        with pytest.raises(ConfigurationError, match="has no counterpart in JDBC"):
            jdbc(f"postgresql://u@localhost/db?{other}")


@pytest.mark.long
def test_the_dsns_parameters_reach_sparks_connections(
    spark: SparkSession, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Where Spark is given conditions it writes the names of properties in small letters; the driver ignored them."""

    def telling_sql(package: str, name: str, schema: str = "sidings") -> str:
        return load_sql(package, name, schema).replace(
            "       error_class,", "       current_setting('application_name') AS error_class,"
        )

    asyncio.run(stored(database, [an_attempt(1)]))
    monkeypatch.setattr(READING, "load_sql", telling_sql)
    dsn = f"{database}?application_name=report"
    with reading(spark, WINDOW, postgres=dsn, scratch=tmp_path) as attempts:
        assert [row.error_class for row in attempts.collect()] == ["report"]


@pytest.mark.long
async def test_an_analysis_whose_read_is_not_answered_ends(
    spark: SparkSession, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It hung for ever."""
    monkeypatch.setattr("sidings.spark_analytics.history.dsn._ANSWER_SECONDS", 2)
    await stored(database, [an_attempt(1)])

    def analysed(dsn: str) -> None:
        with reading(spark, WINDOW, postgres=dsn, scratch=tmp_path) as attempts:
            attempts.count()

    async with proxied(database) as proxy:
        fault = proxy.arm("attempts", Moment.SILENT_BEFORE)
        run = asyncio.create_task(asyncio.to_thread(analysed, proxy.dsn))
        ended, _ = await asyncio.wait({run}, timeout=SECONDS)
        assert fault.hits == 1
    failure = (await asyncio.gather(run, return_exceptions=True))[0]  # without the proxy it ends in any case
    assert ended
    assert "An I/O error occurred while sending to the backend" in str(failure)
