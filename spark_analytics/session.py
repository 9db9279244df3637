"""A Spark session with the connectors that this package reads through."""

import os
import shutil
import sys
from collections.abc import Mapping

try:
    import pyarrow  # noqa: F401 # pyright: ignore[reportUnusedImport] - the extra `devstack` has Spark without it
    import pyspark
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("this needs Spark: pip install 'sidings[spark]'", name=error.name) from None
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from ..errors import ConfigurationError

__all__ = ["JARS_VARIABLE", "KAFKA_CONNECTOR", "POSTGRES_DRIVER", "session"]

KAFKA_CONNECTOR = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{pyspark.__version__}"
POSTGRES_DRIVER = "org.postgresql:postgresql:42.7.14"

JARS_VARIABLE = "SIDINGS_SPARK_JARS"

_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
}


def session(name: str, connector: str, settings: Mapping[str, str] | None = None) -> SparkSession:
    """The running session, or a new one.

    name: of the application, as Spark's pages show it. connector: what it reads through, by its Maven coordinates
    (`KAFKA_CONNECTOR`, `POSTGRES_DRIVER`; fetched once). Where the environment's ``SIDINGS_SPARK_JARS`` names jars,
    separated by commas, these are taken and nothing is fetched. settings: Spark's, which win over those set here.

    Outside of ``spark-submit`` it runs on all cores of this machine; under it, with what its command line says.

    Raises:
        ConfigurationError: Spark's Java did not come up.
    """
    builder = SparkSession.builder.appName(name)
    if "SPARK_ENV_LOADED" not in os.environ:  # as spark-submit sets it
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else the path's first python3 works
        builder = builder.master("local[*]").config("spark.ui.enabled", "false")
        jars = os.environ.get(JARS_VARIABLE)
        builder = builder.config("spark.jars", jars) if jars else builder.config("spark.jars.packages", connector)
    for key, value in {**_SETTINGS, **(settings or {})}.items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except PySparkRuntimeError as error:
        raise ConfigurationError(
            f"Spark does not start: {error}; it needs Java 17 or newer, found through JAVA_HOME or the PATH "
            f"(JAVA_HOME={os.environ.get('JAVA_HOME', '')!r}, java: {shutil.which('java')})"
        ) from error
