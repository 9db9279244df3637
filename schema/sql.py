"""Queries live in ``.sql`` files beside the code that runs them; this module loads them.

In the files the schema is always called ``sidings``, so that they can be pasted into psql as they are. The name
that a service has chosen is the only substitution.
"""

import re
from functools import cache
from importlib.resources import files

from pydantic_core import to_json

from ..errors import ConfigurationError

__all__ = ["check_service_name", "int_array", "load_sql", "rename_schema", "valid_schema_name"]

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,47}")
_QUALIFIER = re.compile(r"\bsidings\.")


def valid_schema_name(schema: str) -> str:
    """Return `schema` if it can stand in SQL without quotes; raise `ConfigurationError` otherwise."""
    named = isinstance(schema, str) and _NAME.fullmatch(schema)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not named or schema.startswith("pg_"):
        raise ConfigurationError(
            f"schema={schema!r} is not usable: give lower-case letters, digits and underscores, at most 48, "
            "not starting with a digit or with 'pg_'"
        )
    return schema


def check_service_name(name: object) -> None:
    """Raise `ConfigurationError` for what is no name of a service."""
    if not isinstance(name, str) or not name or name != name.strip() or not name.isprintable():
        raise ConfigurationError(
            f"service={name!r}: give the service's name, which owns the schema and names the consumer group: printable "
            "letters, without spaces around them"
        )


def rename_schema(sql: str, schema: str) -> str:
    """Put `schema` in the place of the name that the files use."""
    return sql if schema == "sidings" else _QUALIFIER.sub(f"{valid_schema_name(schema)}.", sql)


@cache
def load_sql(package: str, name: str, schema: str = "sidings") -> str:
    """``name.sql`` of `package` (a module's ``__package__``) for the given schema."""
    return rename_schema(_read_all(package)[name], schema)


@cache
def _read_all(package: str) -> dict[str, str]:
    """All at once: when a query that is seldom needed is, as at a stop, the process may have no file left, or its files
    may be those of another release by then."""
    found = (file for file in files(package).iterdir() if file.name.endswith(".sql"))
    return {file.name.removesuffix(".sql"): file.read_text(encoding="utf-8") for file in found}


def int_array(numbers: list[int]) -> str:
    """An array of integers as Postgres writes it: asyncpg and Postgres take half of the time that a list costs them."""
    return "{" + to_json(numbers)[1:-1].decode() + "}"
