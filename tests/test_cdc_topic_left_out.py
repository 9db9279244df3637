"""A configuration that does not have a topic any more that the checkpoint goes on with."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from sidings import ConfigurationError
from sidings.devstack.fixtures import TopicFactory
from sidings.spark_analytics.transactions.topics import check_topics

from .cdc_support import header_rows, produce, read, rows_of
from .test_cdc_streaming import UPDATE, configured, ended

pytestmark = pytest.mark.timeout(900)


@pytest.mark.long
async def test_a_topic_that_is_left_out_is_named_before_anything_is_done(
    spark: SparkSession, sidings_kafka: str, topic: TopicFactory, tmp_path: Path
):
    topics = {name: await topic(name) for name in ("cdc", "more", "customers", "addresses", "alerts")}
    one = configured(topics, sidings_kafka, tmp_path)
    both = one.model_copy(update={"topics": (topics["cdc"], topics["more"])})
    begun = Path(both.checkpoint) / "sources" / "0" / "0"
    begun.parent.mkdir(parents=True)
    begun.touch()  # as Spark does before it reads
    check_topics(spark, both)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=f"'{topics['more']}' is left out, .* put it back"):
            check_topics(spark, one)
    check_topics(spark, both)
    lossy = one.model_copy(update={"kafka_options": {"failOnDataLoss": "false"}})

    def written(*names: str) -> None:
        for name in names:
            file = Path(one.checkpoint) / name
            file.parent.mkdir(exist_ok=True)
            file.touch()

    # That start may end before Spark has gone on without the topic: then it is as it was.
    written("offsets/0")
    for _ in range(2):
        check_topics(spark, lossy)
        with pytest.raises(ConfigurationError, match="is left out"):
            check_topics(spark, one)
    written("commits/0", "offsets/1")  # it has done the last micro-batch again, which had the topic
    with pytest.raises(ConfigurationError, match="is left out"):
        check_topics(spark, one)
    check_topics(spark, both)  # put back after all, so that it has to be left out anew
    written("commits/1")
    with pytest.raises(ConfigurationError, match="is left out"):
        check_topics(spark, one)
    check_topics(spark, lossy)
    written("offsets/2", "commits/2")
    check_topics(spark, one)
    check_topics(spark, one)


@pytest.mark.chaos
async def test_a_topic_that_was_left_out_is_put_back_and_nothing_has_happened(
    spark: SparkSession, sidings_kafka: str, topic: TopicFactory, tmp_path: Path
):
    """Spark's checkpoint had it that the topic is not read any more: the query ended, and so did each with both."""
    topics = {name: await topic(name) for name in ("cdc", "more", "customers", "addresses", "alerts")}
    one = configured(topics, sidings_kafka, tmp_path)
    both = one.model_copy(update={"topics": (topics["cdc"], topics["more"])})

    async def sent(*ids: str) -> None:
        for id, name in zip(ids, (topics["cdc"], topics["more"]), strict=True):
            await produce(sidings_kafka, name, header_rows(id, [UPDATE]))

    await sent("a", "b")
    assert await ended(spark, both) == 0
    await sent("c", "d")
    with pytest.raises(ConfigurationError, match=f"'{topics['more']}' is left out, .* put it back"):
        await ended(spark, one)
    assert await ended(spark, both) == 0
    assert rows_of(await read(both)) == {(id, 1) for id in "abcd"}

    # On purpose.
    await sent("e", "f")
    assert await ended(spark, one.model_copy(update={"kafka_options": {"failOnDataLoss": "false"}})) == 0
    await sent("g", "h")
    assert await ended(spark, one) == 0
    assert rows_of(await read(both)) == {(id, 1) for id in "abcdeg"}
