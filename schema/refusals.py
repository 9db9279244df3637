"""What a failed connection to Postgres means for whoever wrote the DSN."""

import re
from urllib.parse import parse_qs, urlsplit

import asyncpg

from ..errors import ConfigurationError, PostgresUnavailable, SchemaError, SidingsError

__all__ = [
    "NOT_CONNECTED",
    "REFUSED",
    "check_dsn",
    "refusal",
    "refused_migration",
    "refused_option",
    "refused_settings",
    "without_account",
]

REFUSED = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
)
_OF_AN_OPTION = (  # with which a session is to start
    asyncpg.UndefinedObjectError,
    asyncpg.InvalidParameterValueError,
    asyncpg.CantChangeRuntimeParamError,
    asyncpg.FeatureNotSupportedError,  # as a proxy's
)
NOT_CONNECTED = (
    OSError,
    ValueError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # asyncpg 0.32, when the last message of a session that was ended has reached it idle
)


def check_dsn(dsn: str, name: str) -> None:
    """Refuse what does not begin as a DSN does, and a port that is none. asyncpg takes all behind ``postgres:`` for the
    name of a database on this machine, the password included, and connects there; of a port it takes 16 bits.

    Raises:
        ConfigurationError: It shows nothing of the rest, which may hold a password.
    """
    if not isinstance(dsn, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be unchecked
        raise ConfigurationError(f"{name} is a {type(dsn).__name__}: give postgresql://user:password@host/database")
    scheme, colon, rest = dsn.partition("://")
    if not colon or scheme not in ("postgresql", "postgres"):
        given = f"it begins with {scheme + colon!r}" if colon else "it begins with no scheme"
        raise ConfigurationError(f"{name}: {given}: give postgresql://user:password@host/database")
    hosts = re.split("[/?#]", rest, maxsplit=1)[0].rpartition("@")[2]
    options = ",".join(re.findall(r"[?&]port=([^&#]*)", rest))
    if not all(1 <= int(port) <= 65_535 for port in re.findall(r":(\d+)(?=,|$)", hosts) + re.findall(r"\d+", options)):
        raise ConfigurationError(
            f"{name}: a port in it is none: give 1 to 65535, and in user and password percent-encode @ : ? # (%2F, …)"
        )


def refusal(dsn: str, error: BaseException) -> SidingsError:
    """What to raise for the `error` of a connection to `dsn`: `ConfigurationError` where another attempt cannot do
    better, else `PostgresUnavailable`. Raise it ``from None``: the error itself may show a part of the password."""
    where = without_account(dsn)
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


def refused_option(dsn: str, error: BaseException) -> ConfigurationError | None:
    """What to raise for the `error` of a connection to `dsn` where that says it of an option in the DSN, which would be
    refused for ever; asyncpg hands those to the server that it does not know, as some of libpq's."""
    pooler = _is_pgbouncers(error)
    if not pooler and not isinstance(error, _OF_AN_OPTION):
        return None
    told = set(re.findall(r"\w+(?:\.\w+)*", str(error)))
    options = parse_qs(urlsplit(dsn).query)
    inner = re.findall(r"(?:-c\s*|--)([\w.]+)", " ".join(options.get("options", ())))
    names = [name for name in (*options, *inner) if name in told]
    if not names:
        return None
    whose = "PgBouncer" if pooler else "the server"
    remedy = "leave it out, or " + ("add it to PgBouncer's ignore_startup_parameters" if pooler else "correct it")
    if "connect_timeout" in names:
        remedy += "; in place of connect_timeout there is PostgresSettings(connect_seconds=)"
    where = without_account(dsn)
    return ConfigurationError(
        f"postgres=: {whose} at {where} refuses the DSN's option {', '.join(names)} ({error}), which is not one of the "
        f"driver's: {remedy}"
    )


def refused_settings(error: BaseException) -> ConfigurationError | None:
    """What to raise for the `error` of a connection of ours that was to start with settings, where what answers is a
    pooler that takes none, as it would for ever: PgBouncer, or a proxy like that of Amazon RDS."""
    if not _is_pgbouncers(error) and not isinstance(error, asyncpg.FeatureNotSupportedError):
        return None
    return ConfigurationError(
        f"the DSN leads to PgBouncer or another proxy ({error}): give postgres=PostgresSettings(dsn=..., "
        "pgbouncer=True), or set SIDINGS_POSTGRES_PGBOUNCER=true, which Service.from_env and the commands read"
    )


def _is_pgbouncers(error: BaseException) -> bool:
    return isinstance(error, asyncpg.ProtocolViolationError) and "startup parameter" in str(error)


def refused_migration(dsn: str, schema: str, error: BaseException) -> SidingsError | None:
    """What to raise for an `error` amid a migration of `schema`; None: itself."""
    where = without_account(dsn)
    match error:
        case asyncpg.InsufficientPrivilegeError():
            return ConfigurationError(
                f"the role may not migrate the schema {schema!r} in {where}: {error}: migrate as the role that owns "
                "it, or give this one the rights that docs/operations.md names"
            )
        case asyncpg.ReadOnlySQLTransactionError():
            return PostgresUnavailable(
                f"{where} can only be read, as a standby, or by a role with default_transaction_read_only: {error}: "
                "migrate over a DSN of the primary "
                "(postgresql://host1,host2/database?target_session_attrs=primary finds it)"
            )
        case asyncpg.DuplicateTableError() | asyncpg.DuplicateObjectError() | asyncpg.DuplicateFunctionError():
            return SchemaError(
                f"the schema {schema!r} in {where} holds something that is not Sidings': {error}: choose a schema of "
                "its own (schema=..., SIDINGS_SCHEMA)"
            )
        case asyncpg.ObjectNotInPrerequisiteStateError() if "wal_level" in str(error):  # as Amazon Aurora's
            return SchemaError(
                f"{where} tells no position in its WAL: {error}: Sidings has to know the server's timeline; on Amazon "
                "Aurora, where it has not been tried, set rds.logical_replication = 1 and reboot"
            )
        case asyncpg.InvalidParameterValueError() | asyncpg.DuplicateColumnError():  # of a directory table
            return SchemaError(f"the schema {schema!r} in {where} cannot be migrated, nothing has changed: {error}")
        case (
            OSError()
            | asyncpg.PostgresConnectionError()
            | asyncpg.OperatorInterventionError()  # a person has cancelled it, the server stops, a limit was reached
            | asyncpg.IdleInTransactionSessionTimeoutError()
            | asyncpg.InterfaceError()
            | asyncpg.InternalClientError()
        ):
            told = f"{type(error).__name__}: {error}".removesuffix(": ")
            return PostgresUnavailable(
                f"{where} did not answer while it was migrated ({told}): migrate again; it is done as a whole, "
                "or not at all"
            )
        case _:
            return None


def without_account(dsn: str) -> str:
    """The server and its database, for people: without user and password."""
    address, _, options = dsn.partition("?")
    if "@" in options:  # of one of them, or of a password that has a ? in it: nobody can tell
        return dsn.partition("//")[0] + "//..."
    # Up to the last @: a password may have a / or an @, or end in a line break, which asyncpg takes away.
    return re.sub(r"//.*@", "//", address, flags=re.DOTALL)
