"""A Spark for tests."""

import pytest
from pyspark.sql import SparkSession
from sidings.devstack import spark_jars
from sidings.spark_analytics import KAFKA_CONNECTOR, session

__all__ = ["SHORT_LIVED", "start_spark"]

# The optimising compiler would take more of the processor than all else together: with it the tables of a small
# history cost 66 s of CPU, without 33.
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
SETTINGS = {
    "spark.master": "local[2]",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.driver.extraJavaOptions": SHORT_LIVED,
    # A few rows: to compile code for them takes longer than to do without.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


def start_spark() -> SparkSession:
    """A session with two threads and the connectors out of the devstack's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIDINGS_SPARK_JARS", ",".join(map(str, spark_jars())))
        return session("sidings-tests", KAFKA_CONNECTOR, SETTINGS)
