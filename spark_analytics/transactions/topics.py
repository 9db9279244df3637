"""Whether all topics are there, and those that are read are still those that the checkpoint speaks of.

A topic to write to that is missed would be noticed with the first message for it: with the first alert, months later
maybe, which then ends the query and each that is started again.

Spark knows a topic by its name. One that was deleted and made anew it goes on reading at the offset where it was in
the old one, and all that stands before that is passed over without a word. So the ids that Kafka gives to topics are
kept in the checkpoint: `topics/<name>/<id>`, an empty file for each.

Of one that is left out Spark says that it was deleted, but only when it has written into the checkpoint that it is not
read any more: from then on the query does not go on with it either. `topics/<name>/.left-out-<number>`, another empty
file, says that a start was allowed to go on without it, and which micro-batch is the last one that may have it.

Nor does it tell that offsets are missing, as in a checkpoint that was copied or restored in part.
"""

import logging
from typing import Any, cast

from py4j.java_gateway import JavaPackage
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from ...errors import ConfigurationError
from ..session import JARS_VARIABLE, KAFKA_CONNECTOR
from .config import Config

__all__ = ["check_topics"]

log = logging.getLogger("sidings.cdc")

FOLDER = "topics"
LEFT_OUT = ".left-out-"
LOSSY = ("failondataloss", "false")  # an option of Spark's source


def check_topics(spark: SparkSession, config: Config) -> None:
    """Look at all topics, and note down those that are read and that the checkpoint has not seen. The log tells of what
    is compacted.

    Raises:
        ConfigurationError: One does not exist, one that is read was deleted and made anew, one that was read is left
            out, Spark has no connector, it could not read the state at a checkpoint that is new, or the checkpoint
            lacks the offsets of its last micro-batch.
    """
    jvm = cast(Any, spark.sparkContext)._jvm  # Spark 4.2 has no public way to its Kafka, and to the checkpoint's files
    hadoop = cast(Any, spark.sparkContext)._jsc.hadoopConfiguration()
    ids = _ids(jvm, config)
    begun = jvm.org.apache.hadoop.fs.Path(config.checkpoint, "sources/0/0")  # Spark writes it before it reads
    if not begun.getFileSystem(hadoop).exists(begun):  # what a start that failed before that has noted, binds nobody
        begun.getFileSystem(hadoop).delete(jvm.org.apache.hadoop.fs.Path(config.checkpoint, FOLDER), True)
        if begun.toUri().getRawPath() != begun.toUri().getPath():
            raise ConfigurationError(
                f"checkpoint {config.checkpoint!r}: Spark can write the state under a path with a space, or another"
                " character that URLs do not have, and not read it there, so nobody would be told of open transactions."
                " Give another path"
            )
    _check_offsets(jvm, hadoop, config)
    _check_left_out(jvm, hadoop, config)
    for topic in config.read:
        folder = jvm.org.apache.hadoop.fs.Path(config.checkpoint, f"{FOLDER}/{topic}")
        files = folder.getFileSystem(hadoop)
        noted = list[Any](files.listStatus(folder)) if files.exists(folder) else []
        names = [status.getPath().getName() for status in noted]
        known = [name for name in names if not name.startswith(".")]  # else it is a checksum
        if not known:
            files.createNewFile(jvm.org.apache.hadoop.fs.Path(folder, ids[topic]))
        elif ids[topic] not in known:
            raise ConfigurationError(
                f"topic {topic!r} is another one than the checkpoint's: it was deleted and made anew, and its first"
                " records would be passed over. Begin anew, with another `checkpoint`"
            )


def _check_offsets(jvm: Any, hadoop: Any, config: Config) -> None:
    """Where the offsets of a micro-batch that has ended are missing, Spark says "assertion failed", or, when it has
    sent the one before once more, that there is another query."""
    done, known = (_batches(jvm, hadoop, config, name) for name in ("commits", "offsets"))
    if done and max(done) not in known:
        raise ConfigurationError(
            f"checkpoint {config.checkpoint!r} is damaged: it has commits/{max(done)}, and not offsets/{max(done)}."
            " Restore it, or begin anew, with another `checkpoint`"
        )


def _batches(jvm: Any, hadoop: Any, config: Config, log: str) -> set[int]:
    folder = jvm.org.apache.hadoop.fs.Path(config.checkpoint, log)
    files = folder.getFileSystem(hadoop)
    names = [status.getPath().getName() for status in files.listStatus(folder)] if files.exists(folder) else []
    return {int(name) for name in names if name.isdigit()}


def _check_left_out(jvm: Any, hadoop: Any, config: Config) -> None:
    folder = jvm.org.apache.hadoop.fs.Path(config.checkpoint, FOLDER)
    files = folder.getFileSystem(hadoop)
    noted = [status.getPath() for status in files.listStatus(folder)] if files.exists(folder) else []
    lossy = any((name.lower(), value.lower()) == LOSSY for name, value in config.kafka_options.items())
    written, done = (max(_batches(jvm, hadoop, config, name), default=-1) for name in ("offsets", "commits"))
    for path in noted:
        topic = path.getName()
        allowed = [mark.getPath() for mark in files.listStatus(path) if mark.getPath().getName().startswith(LEFT_OUT)]
        if any(done > int(mark.getName().removeprefix(LEFT_OUT)) for mark in allowed):
            files.delete(path, True)  # Spark has gone on without it
        elif topic in config.read:
            for mark in allowed:
                files.delete(mark, True)
        elif lossy:
            # It binds until a further micro-batch has ended: this start may end before, and so be for nothing.
            files.createNewFile(jvm.org.apache.hadoop.fs.Path(path, f"{LEFT_OUT}{written}"))
        else:
            raise ConfigurationError(
                f"topic {topic!r} is left out, and the checkpoint goes on with it: put it back. To go on without it,"
                ' start once with failOnDataLoss = "false" among `kafka_options`, or begin anew, with another'
                " `checkpoint`"
            )


def _ids(jvm: Any, config: Config) -> dict[str, str]:
    options = {name[6:]: value for name, value in config.kafka_options.items() if name.lower().startswith("kafka.")}
    client = jvm.org.apache.kafka.clients.admin.AdminClient
    if isinstance(client, JavaPackage):  # a name that Java does not know
        raise ConfigurationError(
            f"Spark has no connector to Kafka: give spark-submit `--packages {KAFKA_CONNECTOR}`, or `--jars` with its"
            f" files; outside of it, the environment's {JARS_VARIABLE}, if it is set, has to name them"
        )
    admin = client.create(options | {"bootstrap.servers": config.kafka})
    ids: dict[str, str] = {}
    try:
        topics = dict.fromkeys((*config.read, *(group.topic for group in config.groups), config.alerts))
        found = admin.describeTopics(list(topics)).topicNameValues()
        for topic in topics:
            try:
                ids[topic] = found.get(topic).get().topicId().toString()
            except Py4JJavaError as error:
                if "UnknownTopicOrPartitionException" not in str(cast(Any, error).java_exception):
                    raise
        _tell_compacted(jvm, admin, [topic for topic in config.read if topic in ids])
    finally:
        admin.close()
    if missing := [topic for topic in topics if topic not in ids]:
        raise ConfigurationError(
            f"no such topic at {config.kafka}: {', '.join(map(repr, missing))}. Create what is missing"
        )
    return ids


def _tell_compacted(jvm: Any, admin: Any, topics: list[str]) -> None:
    """In the log: those of which Kafka takes older versions of a row away. Where it does not tell, as for want of a
    right, nothing is said: the query itself does without."""
    resource = jvm.org.apache.kafka.common.config.ConfigResource
    asked = {topic: resource(resource.Type.TOPIC, topic) for topic in topics}
    found = admin.describeConfigs(list(asked.values())).values()
    for topic in topics:
        try:
            entry = found.get(asked[topic]).get().get("cleanup.policy")
        except Py4JJavaError as error:
            log.debug("the cleanup.policy of topic %r is not known: %s", topic, cast(Any, error).java_exception)
            continue
        policy = entry and entry.value()
        if policy and "compact" in policy:
            log.warning(
                "the topic %r has cleanup.policy=%s: Kafka takes older versions of a row away, and transactions whose"
                " rows are gone before they are read are never complete, and given up, with the rows of all roots; set"
                " cleanup.policy=delete",
                *(topic, policy),
            )
