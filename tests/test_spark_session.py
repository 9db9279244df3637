"""The session that the Spark parts use, with the connectors of this machine."""

from pyspark.sql import SparkSession


async def test_it_reads_a_topic(spark: SparkSession, sidings_kafka: str, topic):
    name = await topic("t", partitions=1)
    rows = spark.read.format("kafka").option("kafka.bootstrap.servers", sidings_kafka).option("subscribe", name).load()
    assert rows.count() == 0
