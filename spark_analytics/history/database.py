"""The connection that histories are read and archived through."""

import os
from typing import TYPE_CHECKING, Literal

import asyncpg

from ...errors import ConfigurationError, PostgresUnavailable, SchemaMissing
from ...schema import connect_any

__all__ = ["Connection", "connected", "unlimited"]

if TYPE_CHECKING:
    Connection = asyncpg.Connection[asyncpg.Record]

_CONNECT_SECONDS = 10.0


async def connected(dsn: str, schema: str, *, call_seconds: float) -> "Connection":
    """A connection to a database with the schema.

    Raises `ConfigurationError` for a DSN that is none, `PostgresUnavailable` where nobody answers, or it is refused;
    `SchemaMissing` where the schema is not there, or too old. None of them says what the DSN's password is.
    """
    try:
        connection = await connect_any(
            dsn,
            password=os.environ.get("SIDINGS_POSTGRES_PASSWORD"),
            timeout=_CONNECT_SECONDS,
            command_timeout=call_seconds,
            statement_cache_size=0,
        )
    except asyncpg.InterfaceError as error:
        raise ConfigurationError(f"the DSN cannot be used: {error}") from None
    except (ValueError, OverflowError):  # that of int() shows what it was given: often, a piece of the password
        raise ConfigurationError(
            "the DSN cannot be used: its host or port cannot be read; in a user or password, write / as %2F, @ as %40 "
            "and : as %3A"
        ) from None
    except (asyncpg.PostgresError, OSError) as error:
        raise PostgresUnavailable(
            f"Postgres cannot be reached: {str(error) or type(error).__name__}; check the DSN, and that the server runs"
        ) from error
    if await connection.fetchval("SELECT to_regclass($1)", f"{schema}.history_archive") is None:
        connection.terminate()
        raise SchemaMissing(
            f"the database has no schema {schema!r} of Sidings, or one from before the archive: check the DSN and the "
            "schema's name, or migrate (python -m sidings.schema)"
        )
    return connection


def unlimited(connection: "Connection", scope: Literal["LOCAL", "SESSION"]) -> str:
    """The statements that lift the role's and the database's limits on statements and transactions, which a large day
    exceeds."""
    limits = f"SET {scope} statement_timeout = 0; SET {scope} idle_in_transaction_session_timeout = 0"
    if connection.get_server_version().major >= 17:
        limits += f"; SET {scope} transaction_timeout = 0"
    return limits
