"""Settings from environment variables."""

import logging
import os
import re
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from ..errors import ConfigurationError
from ..executor import ExecutorSettings, PostgresSettings
from .settings import KafkaSettings

__all__ = ["ARGUMENTS", "environment", "postgres_of", "told_by_variables", "warn_of_no_effect"]

log = logging.getLogger("sidings.service")

# The variable of each argument of `Service` that has one of its own.
ARGUMENTS = {name: f"SIDINGS_{name.upper()}" for name in ("postgres", "kafka", "schema", "http", "topics")}
_IN_CODE = {"ssl_context", "sasl_oauth_token_provider"}  # which no text can say
# What others call the addresses.
_OTHER_WORDS = {
    "kafka": ("BOOTSTRAP_SERVERS", "KAFKA_BOOTSTRAP_SERVERS", "KAFKA_BROKERS", "KAFKA_SERVERS", "KAFKA_URL"),
    "postgres": ("DATABASE_URL", "POSTGRES_URL"),
}
_CLOSE = 0.89  # as KAFKA_PASSWORD is to KAFKA_SASL_PASSWORD; not as KAFKA_VERSION is to KAFKA_SERVERS
# What Kubernetes sets in each pod for a service whose name begins so.
_SERVICE_LINK = re.compile(r"SIDINGS\w*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_\w+)?)")


def _config(prefix: str) -> SettingsConfigDict:
    return SettingsConfigDict(env_prefix=prefix, frozen=True, extra="ignore", env_ignore_empty=True)


class _Filled(BaseSettings):
    """Messages name variables instead of fields."""

    @classmethod
    def title(cls, values: object) -> str:
        return "environment"

    @classmethod
    def named(cls, field: str) -> str:
        alias = cls.model_fields[field].validation_alias if field in cls.model_fields else field
        return str(alias or cls.in_full(field))

    @classmethod
    def in_full(cls, field: str) -> str:
        """The name by the rule, which is not the variable's where that is a shorter one."""
        return f"{cls.model_config.get('env_prefix', '')}{field}".upper()


# Each is its model, filled from the environment. That the two bases type `model_config` differently is pydantic's
# matter.
class _Kafka(_Filled, KafkaSettings):  # pyright: ignore[reportIncompatibleVariableOverride]
    model_config = _config("SIDINGS_KAFKA_")
    bootstrap: str = Field(validation_alias="SIDINGS_KAFKA")


class _Postgres(_Filled, PostgresSettings):  # pyright: ignore[reportIncompatibleVariableOverride]
    model_config = _config("SIDINGS_POSTGRES_")
    dsn: str = Field(validation_alias="SIDINGS_POSTGRES")
    schema_name: str = Field(default="sidings", validation_alias="SIDINGS_SCHEMA")


class _Executor(_Filled, ExecutorSettings):  # pyright: ignore[reportIncompatibleVariableOverride]
    model_config = _config("SIDINGS_EXECUTOR_")


_TABLES: dict[str, type[_Filled]] = {"postgres": _Postgres, "kafka": _Kafka, "executor": _Executor}


def environment(without: Collection[str] = ()) -> dict[str, Any]:
    """The arguments of `Service` that the environment gives.

    without: the tables that are not read, whatever is wrong in them: where code gives the argument, and for commands
    that need only some. Raises `ConfigurationError`.
    """
    given: dict[str, Any] = {}
    for argument, settings in _TABLES.items():
        variable = ARGUMENTS.get(argument)
        if argument not in without and (variable is None or os.environ.get(variable)):
            given[argument] = _filled(settings)
    if schema := os.environ.get("SIDINGS_SCHEMA"):
        given["schema"] = schema
    if http := os.environ.get("SIDINGS_HTTP"):
        given["http"] = http
    if topics := os.environ.get("SIDINGS_TOPICS"):
        given["topics"] = [name for topic in topics.split(",") if (name := topic.strip())]
    _warn_of_typos()
    return given


def postgres_of(dsn: str, schema: str) -> PostgresSettings:
    """The settings of a database that a command was given: those of the environment, which are of the way there. Not so
    the password: it is for the server that SIDINGS_POSTGRES names, and no other is told it. Raises
    `ConfigurationError`."""
    given = _filled(_Postgres, SIDINGS_POSTGRES=dsn, SIDINGS_SCHEMA=schema)
    _warn_of_typos()
    its_own = dsn == os.environ.get("SIDINGS_POSTGRES")
    return given if its_own else given.model_copy(update={"password": None})


@contextmanager
def told_by_variables(variables: Mapping[str, str]) -> Generator[None]:
    """Put the variables in front of a `ConfigurationError` that names fields or arguments. variables: by these."""
    try:
        yield
    except ConfigurationError as error:
        text = str(error)
        meant = [variable for name, variable in variables.items() if re.search(rf"\b{name}(=|: |\()", text)]
        if not meant or text.startswith("environment: "):
            raise
        raise ConfigurationError(f"environment: {', '.join(meant)}: {text}") from None


def _filled(settings: type[_Filled], **given: str) -> Any:
    variables = {field: settings.named(field) for field in settings.model_fields if field not in _IN_CODE}
    try:
        with told_by_variables({"schema": ARGUMENTS["schema"]} | variables):
            return settings(**given)
    except SettingsError as error:  # that it is no JSON is told before the model sees it, and only by the field
        field = str(error).partition('"')[2].partition('"')[0]
        raise ConfigurationError(f"environment: {settings.named(field)}: give JSON") from None


def _warn_of_typos() -> None:
    """Tell of variables that are almost a setting, by whichever name. Others that begin so may be somebody's."""
    fields = [(settings, field) for settings in _TABLES.values() for field in settings.model_fields]
    known = {settings.named(field) for settings, field in fields} | set(ARGUMENTS.values())
    meant = {name: name for name in known}
    meant |= {f"SIDINGS_{word}": ARGUMENTS[argument] for argument, words in _OTHER_WORDS.items() for word in words}
    all_fields = [field for _, field in fields if field not in _IN_CODE]
    for settings, field in fields:
        meant[settings.in_full(field)] = settings.named(field)
        if all_fields.count(field) == 1:  # else nobody knows whose is meant
            meant[f"SIDINGS_{field}".upper()] = settings.named(field)
    for name in sorted(name for name in os.environ if name.startswith("SIDINGS_") and name not in known):
        if not _SERVICE_LINK.fullmatch(name) and (close := get_close_matches(name, meant, 1, _CLOSE)):
            log.warning("%s is no setting and has no effect: is %s meant?", name, meant[close[0]])


def warn_of_no_effect(overrides: Mapping[str, Any]) -> None:
    """Tell of variables whose table `Service.from_env` does not read. overrides: the arguments in code."""
    for argument, settings in _TABLES.items():
        variable = ARGUMENTS.get(argument)
        if argument not in overrides and variable is not None and not os.environ.get(variable):
            why = f"{variable} is not set ({argument}=None in code says that there is to be none)"
        elif overrides.get(argument) is not None:
            why = f"{argument}= is given in code"
        else:  # it is read; or None says in code that there is to be none
            continue
        fields = settings.model_fields.keys() - _IN_CODE
        names = {settings.named(field) for field in fields} - set(ARGUMENTS.values())
        if idle := sorted(name for name in names if os.environ.get(name)):
            log.warning("%s: not read by from_env, as %s", ", ".join(idle), why)
