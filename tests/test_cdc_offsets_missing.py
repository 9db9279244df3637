"""A checkpoint that was copied, or restored, in part: what was read is missing for what has been done."""

import shutil
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from sidings import ConfigurationError
from sidings.devstack.fixtures import TopicFactory
from sidings.spark_analytics.transactions.topics import check_topics

from .cdc_support import header_rows, produce, read, rows_of
from .test_cdc_streaming import UPDATE, configured, ended

pytestmark = pytest.mark.timeout(900)
TOPICS = ("cdc", "customers", "addresses", "alerts")


@pytest.mark.long
async def test_offsets_that_are_missing_are_named_before_anything_is_sent(
    spark: SparkSession, sidings_kafka: str, topic: TopicFactory, tmp_path: Path
):
    by = configured({name: await topic(name) for name in TOPICS}, sidings_kafka, tmp_path)
    checkpoint = Path(by.checkpoint)
    for log in ("commits", "offsets"):
        (checkpoint / log).mkdir(parents=True)
        for batch in (9, 10):
            (checkpoint / log / str(batch)).touch()
            (checkpoint / log / f".{batch}.crc").touch()
    (checkpoint / "offsets" / "11").touch()  # it was under way
    check_topics(spark, by)
    for batch in (10, 11):
        (checkpoint / "offsets" / str(batch)).unlink()
        with pytest.raises(ConfigurationError, match="is damaged: it has commits/10, and not offsets/10"):
            check_topics(spark, by)
    shutil.rmtree(checkpoint / "offsets")
    with pytest.raises(ConfigurationError, match="is damaged: it has commits/10, and not offsets/10"):
        check_topics(spark, by)
    shutil.rmtree(checkpoint / "commits")
    check_topics(spark, by)


@pytest.mark.chaos
async def test_nothing_is_sent_again_where_the_last_offsets_are_missing(
    spark: SparkSession, sidings_kafka: str, topic: TopicFactory, tmp_path: Path
):
    """Each start sent events of the micro-batch before once more, and said that there was another query."""
    by = configured({name: await topic(name) for name in TOPICS}, sidings_kafka, tmp_path)
    for id in "ab":
        await produce(sidings_kafka, by.topics[0], header_rows(id, [UPDATE]))
        assert await ended(spark, by) == 0
    last = max((Path(by.checkpoint) / "offsets").glob("[0-9]*"), key=lambda file: int(file.name))
    last.rename(tmp_path / "kept")
    with pytest.raises(ConfigurationError, match=f"it has commits/{last.name}, and not offsets/{last.name}"):
        await ended(spark, by)
    assert len(await read(by)) == 2
    (tmp_path / "kept").rename(last)
    await produce(sidings_kafka, by.topics[0], header_rows("c", [UPDATE]))
    assert await ended(spark, by) == 0
    assert rows_of(await read(by)) == {(id, 1) for id in "abc"}
    assert len(await read(by)) == 3
