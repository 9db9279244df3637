"""What a service was given, checked."""

from collections.abc import Collection

from prometheus_client import CollectorRegistry

from ..errors import ConfigurationError
from ..executor import ExecutorSettings, PostgresSettings
from ..kafka import KafkaSettings, OutboxSettings, StaticAssignment

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
        prometheus: CollectorRegistry,
    ) -> None:
        if not name:
            raise ConfigurationError("Service(name): give a name; it owns the schema and names the consumer group")
        if kafka is not None and assignment is not None:
            raise ConfigurationError("kafka= and assignment= exclude each other: either Kafka assigns, or you do")
        if isinstance(topics, str):
            raise ConfigurationError(f"topics={topics!r}: give a list of topics")
        if topics and kafka is None:
            raise ConfigurationError("topics= needs kafka=: it is Kafka that assigns their partitions")
        self.name = name
        self.postgres = _postgres(postgres, schema)
        self.kafka = KafkaSettings(bootstrap=kafka) if isinstance(kafka, str) else kafka
        self.assignment = assignment
        self.topics = tuple(topics)
        self.executor = executor
        self.outbox = outbox
        self.http = http
        self.prometheus = prometheus


def _postgres(postgres: str | PostgresSettings | None, schema: str | None) -> PostgresSettings | None:
    if isinstance(postgres, str):
        return PostgresSettings(dsn=postgres, schema_name=schema or "sidings")
    if postgres is not None and schema is not None and schema != postgres.schema_name:
        raise ConfigurationError(f"schema={schema!r} contradicts PostgresSettings.schema_name={postgres.schema_name!r}")
    return postgres
