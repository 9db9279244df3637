"""What a service was given, checked."""

from collections.abc import Collection, Iterable
from typing import Any

from prometheus_client import CollectorRegistry

from ..errors import ConfigurationError
from ..executor import ExecutorSettings, PostgresSettings
from ..kafka import KafkaSettings, OutboxSettings, StaticAssignment, check_topic
from ..schema import check_service_name, valid_schema_name

__all__ = ["Configuration"]


class Configuration:
    """The arguments of `Service`, each in one form only.

    Raises `ConfigurationError` for those that do not go together.
    """

    def __init__(
        self,
        name: str,
        *,
        postgres: str | PostgresSettings | None,
        kafka: str | KafkaSettings | None,
        assignment: StaticAssignment | None,
        topics: Collection[str],
        schema: str | None,
        executor: ExecutorSettings | None,
        outbox: OutboxSettings | None,
        http: str | int | None,
        prometheus: CollectorRegistry | None,
    ) -> None:
        check_service_name(name)
        _check_kinds(
            postgres=(postgres, str | PostgresSettings, "a DSN, or PostgresSettings(dsn=...)"),
            kafka=(kafka, str | KafkaSettings, "'host:port', or KafkaSettings(bootstrap=...)"),
            assignment=(assignment, StaticAssignment, "StaticAssignment([...])"),
            executor=(executor, ExecutorSettings, "ExecutorSettings(...)"),
            outbox=(outbox, OutboxSettings, "OutboxSettings(...)"),
            prometheus=(prometheus, CollectorRegistry, "a CollectorRegistry of prometheus_client, or None"),
        )
        if kafka is not None and assignment is not None:
            raise ConfigurationError("kafka= and assignment= exclude each other: either Kafka assigns, or you do")
        if isinstance(topics, str) or not isinstance(topics, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"topics={topics!r}: give a list of topics")
        if topics and kafka is None:
            raise ConfigurationError("topics= needs kafka=: it is Kafka that assigns their partitions")
        self.name = name
        self.postgres = _postgres(postgres, schema)
        self.kafka = KafkaSettings(bootstrap=kafka) if isinstance(kafka, str) else kafka
        self.assignment = assignment
        self.topics = tuple(topics)
        for topic in self.topics:
            check_topic(topic, "topics", leased=self.postgres is not None)
        self.executor = executor or ExecutorSettings()
        self.outbox = outbox or OutboxSettings()
        self.http = http
        self.prometheus = CollectorRegistry() if prometheus is None else prometheus


def _check_kinds(**given: tuple[object, Any, str]) -> None:
    """given: per argument its value, its type, and what to give; the value, which may hold a password, is not shown."""
    for argument, (value, kind, remedy) in given.items():
        if value is not None and not isinstance(value, kind):
            raise ConfigurationError(f"{argument}= is a {type(value).__name__}: give {remedy}")


def _postgres(postgres: str | PostgresSettings | None, schema: str | None) -> PostgresSettings | None:
    if isinstance(postgres, str):
        return PostgresSettings(dsn=postgres, schema_name=schema or "sidings")
    if postgres is None or schema is None or schema == postgres.schema_name:
        return postgres
    if "schema_name" in postgres.model_fields_set:
        raise ConfigurationError(f"schema={schema!r} contradicts PostgresSettings.schema_name={postgres.schema_name!r}")
    return postgres.model_copy(update={"schema_name": valid_schema_name(schema)})
