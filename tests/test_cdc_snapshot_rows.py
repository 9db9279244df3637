"""Rows of a snapshot that are different rows of one root, though what tells them apart is not where it is sought."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from sidings.devstack.fixtures import TopicFactory

from .cdc_support import Json, Row, header_row, produce
from .test_cdc_combining import CONFIG, decoded
from .test_cdc_streaming import configured, running

CUSTOMER = {"customer_id": 7}
SPARSE = [CUSTOMER | {"home": 1}, CUSTOMER | {"work": 1}]  # a source that leaves out what is null
MISSPELT = [CUSTOMER | {"nametype": "nick", "name": "Al"}, CUSTOMER | {"nametype": "full", "name": "Albert"}]


@pytest.mark.parametrize(("table", "rows"), [("CustomerAddresses", SPARSE), ("CustomerNames", MISSPELT)])
def test_rows_that_differ_in_a_columns_name_or_lack_the_key_are_told_apart(table: str, rows: Sequence[Json]):
    """CustomerAddresses has no primary key that is known; that of CustomerNames is (customer_id, name_type)."""
    items = decoded([header_row(Row(table, "REFRESH", data)) for data in [*rows, *rows]], by=CONFIG)
    assert len({item.part for item in items}) == len(rows)


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_a_snapshot_has_all_of_them(spark: SparkSession, sidings_kafka: str, topic: TopicFactory, tmp_path: Path):
    topics = {name: await topic(name, partitions=1) for name in ("cdc", "customers", "addresses", "alerts")}
    by = configured(topics, sidings_kafka, tmp_path, snapshot_quiet_seconds=2)
    rows = [*(Row("CustomerAddresses", "REFRESH", data) for data in SPARSE),
            *(Row("CustomerNames", "REFRESH", data) for data in MISSPELT)]  # fmt: skip
    await produce(sidings_kafka, topics["cdc"], [header_row(row) for row in [*rows, *rows]])
    async with running(spark, by) as (_, until):
        found = await until(bool, "the snapshot")

    def ordered(of: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(of, key=str)

    (event,) = found
    assert ordered([row["data"] for row in event.value["rows"]]) == ordered([row.data for row in rows])
