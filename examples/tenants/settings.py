"""The example's settings, from environment variables ``TENANTS_…``. Durations are seconds."""

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict
from sidings import ExecutorSettings, KafkaSettings, OutboxSettings, PostgresSettings, Service

__all__ = ["Settings", "Topics"]


class Topics:
    """The names of the topics. All but `users` and `seats` are the chain that a tenant goes through."""

    def __init__(self, prefix: str) -> None:
        self.pending = f"{prefix}tenant-pending"
        self.created = f"{prefix}tenant-created"
        self.failed = f"{prefix}tenant-failed"
        self.users = f"{prefix}tenant-users"
        self.seats = f"{prefix}tenant-seats"

    def all(self) -> list[str]:
        """All names."""
        return [self.pending, self.created, self.failed, self.users, self.seats]


class Settings(BaseSettings):
    """Where things are, and which parts this process runs.

    parts: ``all`` is the monolith; ``api`` and ``processor`` run one of them, in as many processes as you like.
    payment: URL of the payment provider. prefix: of the topics' names.
    acknowledge_seconds: how long an answer may wait for Kafka. payment_seconds: how long one call of the provider may
    take. lease_seconds, session_seconds: a takeover after a kill takes about so long; short in the tests.
    """

    model_config = SettingsConfigDict(env_prefix="TENANTS_", frozen=True)

    postgres: str
    kafka: str
    payment: str = ""
    parts: Literal["all", "api", "processor"] = "all"
    host: str = "127.0.0.1"
    port: int = 8080
    prefix: str = ""
    acknowledge_seconds: float = Field(default=10.0, gt=0)
    payment_seconds: float = Field(default=5.0, gt=0)
    lease_seconds: float = 15.0
    session_seconds: float = 10.0
    max_records: int = 1_000

    @property
    def topics(self) -> Topics:
        """The topics' names."""
        return Topics(self.prefix)

    def service(self, part: str) -> Service:
        """A service for one part. Each part has a schema and a consumer group of its own: what the parts know of each
        other, they know from Kafka, so they may as well have databases of their own."""
        return Service(
            f"{self.prefix}tenants-{part}",
            postgres=PostgresSettings(dsn=self.postgres, schema_name=f"sidings_{part}"),
            kafka=KafkaSettings(
                bootstrap=self.kafka, session_seconds=self.session_seconds, max_records=self.max_records
            ),
            executor=ExecutorSettings(lease_seconds=self.lease_seconds),
            outbox=OutboxSettings(lease_seconds=self.lease_seconds),
        )
