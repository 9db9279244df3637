"""Settings from environment variables."""

import os
from typing import Any

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from ..errors import ConfigurationError
from ..executor import ExecutorSettings, PostgresSettings
from ..kafka import KafkaSettings

__all__ = ["environment"]


def _config(prefix: str) -> SettingsConfigDict:
    return SettingsConfigDict(env_prefix=prefix, frozen=True, extra="ignore", env_ignore_empty=True)


# Each is its model, filled from the environment. That the two bases type `model_config` differently is pydantic's
# matter.
class _Kafka(BaseSettings, KafkaSettings):  # pyright: ignore[reportIncompatibleVariableOverride]
    model_config = _config("SIDINGS_KAFKA_")
    bootstrap: str = Field(validation_alias="SIDINGS_KAFKA")


class _Postgres(BaseSettings, PostgresSettings):  # pyright: ignore[reportIncompatibleVariableOverride]
    model_config = _config("SIDINGS_POSTGRES_")
    dsn: str = Field(validation_alias="SIDINGS_POSTGRES")
    schema_name: str = Field(default="sidings", validation_alias="SIDINGS_SCHEMA")


class _Executor(BaseSettings, ExecutorSettings):  # pyright: ignore[reportIncompatibleVariableOverride]
    model_config = _config("SIDINGS_EXECUTOR_")


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
