"""What a failed connection to Postgres means for whoever wrote the DSN."""

import re

import asyncpg

from ..errors import ConfigurationError, PostgresUnavailable, SidingsError

__all__ = ["NOT_CONNECTED", "REFUSED", "refusal"]

REFUSED = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
)
NOT_CONNECTED = (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError)


def refusal(dsn: str, error: BaseException) -> SidingsError:
    """What to raise for the `error` of a connection to `dsn`: `ConfigurationError` where another attempt cannot do
    better, else `PostgresUnavailable`. Raise it ``from None``: the error itself may show a part of the password."""
    where = re.sub(r"//.*@", "//", dsn).partition("?")[0]  # up to the last @: a password may have a / or an @
    remedy = "correct the DSN (Service.from_env: SIDINGS_POSTGRES)"
    if isinstance(error, asyncpg.ClientConfigurationError):  # of an option in it
        return ConfigurationError(f"postgres=: {error}: {remedy}")
    if isinstance(error, ValueError):
        return ConfigurationError(
            "postgres=: this DSN cannot be read: in user and password / @ : ? # have to be percent-encoded (%2F, …)"
        )
    if isinstance(error, REFUSED):
        return ConfigurationError(
            f"postgres=: {where} refuses: {error}: {remedy}, or give its role the rights that docs/operations.md names"
        )
    return PostgresUnavailable(f"no connection to {where}: {type(error).__name__}: {error}".removesuffix(": "))
