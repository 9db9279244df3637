"""Events of more than a megabyte, where the topics take them."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from sidings.devstack.fixtures import TopicFactory

from .cdc_support import Row, header_rows, produce, read
from .test_cdc_streaming import configured, ended

pytestmark = pytest.mark.timeout(900)


@pytest.mark.chaos
@pytest.mark.parametrize("count", [4, 70])  # the latter is more than Kafka's producer has in memory
async def test_an_event_that_its_topic_takes_is_sent_however_large(
    spark: SparkSession, sidings_kafka: str, topic: TopicFactory, tmp_path: Path, count: int
):
    large = {"max.message.bytes": "50000000"}
    topics = {name: await topic(name, config=large) for name in ("cdc", "customers", "addresses", "alerts")}
    by = configured(topics, sidings_kafka, tmp_path, max_event_bytes=40_000_000)
    rows = [Row("Customers", "UPDATE", {"customer_id": 7, "text": "x" * 500_000})] * count
    await produce(sidings_kafka, topics["cdc"], header_rows("t", rows))
    assert await ended(spark, by) == 0
    (sent,) = await read(by)
    assert [row["ordinal"] for row in sent.value["rows"]] == list(range(1, count + 1))
