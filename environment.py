"""Settings from environment variables."""

import os
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from .errors import ConfigurationError
from .executor import ExecutorSettings, PostgresSettings
from .kafka import KafkaSettings

__all__ = ["environment"]


class _Kafka(BaseSettings, KafkaSettings):
    model_config = SettingsConfigDict(env_prefix="SIDINGS_KAFKA_", frozen=True, extra="ignore")
    bootstrap: str = Field(validation_alias="SIDINGS_KAFKA")


class _Postgres(BaseSettings, PostgresSettings):
    model_config = SettingsConfigDict(env_prefix="SIDINGS_POSTGRES_", frozen=True, extra="ignore")
    dsn: str = Field(validation_alias="SIDINGS_POSTGRES")
    schema_name: str = Field(default="sidings", validation_alias="SIDINGS_SCHEMA")


class _Executor(BaseSettings, ExecutorSettings):
    model_config = SettingsConfigDict(env_prefix="SIDINGS_EXECUTOR_", frozen=True, extra="ignore")


def environment() -> dict[str, Any]:
    """The arguments of `Service` that the environment gives. Raises `ConfigurationError`."""
    given: dict[str, Any] = {}
    try:
        if os.environ.get("SIDINGS_POSTGRES"):
            given["postgres"] = _Postgres()  # pyright: ignore[reportCallIssue] - filled from the environment
        if os.environ.get("SIDINGS_KAFKA"):
            given["kafka"] = _Kafka()  # pyright: ignore[reportCallIssue]
        given["executor"] = _Executor()
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_input=False))
        raise ConfigurationError(f"environment: {what}") from None
    if http := os.environ.get("SIDINGS_HTTP"):
        given["http"] = http
    if topics := os.environ.get("SIDINGS_TOPICS"):
        given["topics"] = [topic.strip() for topic in topics.split(",")]
    return given
