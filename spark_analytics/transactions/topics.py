"""Whether the topics that are read are still those that the checkpoint speaks of.

Spark knows a topic by its name. One that was deleted and made anew it goes on reading at the offset where it was in
the old one, and all that stands before that is passed over without a word. So the ids that Kafka gives to topics are
kept in the checkpoint: `topics/<name>/<id>`, an empty file for each.
"""

from typing import Any, cast

from pyspark.sql import SparkSession

from ...errors import ConfigurationError
from .config import Config

__all__ = ["check_topics"]

FOLDER = "topics"


def check_topics(spark: SparkSession, config: Config) -> None:
    """Look at all topics that are read, and note down those that the checkpoint has not seen.

    Raises:
        ConfigurationError: One was deleted and made anew.
    """
    jvm = cast(Any, spark.sparkContext)._jvm  # Spark 4.2 has no public way to its Kafka, and to the checkpoint's files
    hadoop = cast(Any, spark.sparkContext)._jsc.hadoopConfiguration()
    for topic, id in _ids(jvm, config).items():
        folder = jvm.org.apache.hadoop.fs.Path(config.checkpoint, f"{FOLDER}/{topic}")
        files = folder.getFileSystem(hadoop)
        names = [status.getPath().getName() for status in files.globStatus(jvm.org.apache.hadoop.fs.Path(folder, "*"))]
        known = [name for name in names if not name.startswith(".")]  # else it is a checksum
        if not known:
            files.createNewFile(jvm.org.apache.hadoop.fs.Path(folder, id))
        elif id not in known:
            raise ConfigurationError(
                f"topic {topic!r} is another one than the checkpoint's: it was deleted and made anew, and its first"
                " records would be passed over. Begin anew, with another `checkpoint`"
            )


def _ids(jvm: Any, config: Config) -> dict[str, str]:
    options = {name[6:]: value for name, value in config.kafka_options.items() if name.lower().startswith("kafka.")}
    admin = jvm.org.apache.kafka.clients.admin.AdminClient.create(options | {"bootstrap.servers": config.kafka})
    try:
        found = admin.describeTopics(list(config.read)).allTopicNames().get()
        return {topic: found.get(topic).topicId().toString() for topic in config.read}
    finally:
        admin.close()
