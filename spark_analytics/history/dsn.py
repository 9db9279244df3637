"""A Postgres DSN as JDBC wants it."""

import os
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from ...errors import ConfigurationError

__all__ = ["Jdbc", "jdbc"]

_SAME = {"sslmode", "sslrootcert", "sslcert", "sslkey", "options"}
_RENAMED = {
    "application_name": "ApplicationName",
    "connect_timeout": "connectTimeout",
    "gssencmode": "gssEncMode",
}
_OF_ENVIRONMENT = {
    "PGSSLMODE": "sslmode",
    "PGSSLROOTCERT": "sslrootcert",
    "PGSSLCERT": "sslcert",
    "PGSSLKEY": "sslkey",
}  # as asyncpg takes them, where the DSN has none
_SESSIONS = {
    "any": "any",
    "primary": "primary",
    "read-write": "primary",
    "standby": "secondary",
    "read-only": "secondary",
    "prefer-standby": "preferSecondary",
}
_ANSWER_SECONDS = 600  # else, where the server or the network has gone, the answer is waited for without end
_EXAMPLE = "e.g. postgresql://user:password@host:5432/database"


@dataclass(frozen=True)
class Jdbc:
    """A URL without secrets, and the connection's properties, with them."""

    url: str
    properties: dict[str, str]


def jdbc(dsn: str) -> Jdbc:
    """Translate a ``postgresql://`` DSN: user, password, several hosts, and libpq's parameters. As everywhere,
    ``SIDINGS_POSTGRES_PASSWORD`` stands for the DSN's password, and ``PGPASSWORD``, ``PGSSLMODE`` and its like are
    taken where it says nothing.

    Raises `ConfigurationError` for what JDBC cannot do: Unix sockets, parameters that it does not know.
    """
    try:
        parts = urlsplit(dsn)
    except ValueError as error:
        raise ConfigurationError(f"this is no DSN of Postgres ({error}): give {_EXAMPLE}") from None
    if parts.scheme not in ("postgresql", "postgres"):
        raise ConfigurationError(f"this is no DSN of Postgres: give {_EXAMPLE}")
    if "@" in parts.path:
        raise ConfigurationError("the DSN cannot be read: in a user or password, write / as %2F and @ as %40")
    credentials, _, hosts = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    properties = {
        "user": unquote(user) or os.environ.get("PGUSER", ""),
        "driver": "org.postgresql.Driver",
        "tcpKeepAlive": "true",
        "socketTimeout": str(_ANSWER_SECONDS),
    }
    own = os.environ.get("SIDINGS_POSTGRES_PASSWORD")
    if secret := own or unquote(password) or os.environ.get("PGPASSWORD"):
        properties["password"] = secret
    for key, value in parse_qsl(parts.query, keep_blank_values=True):
        if key in ("user", "password") or key in _SAME:
            properties[key] = value
        elif key in _RENAMED:
            properties[_RENAMED[key]] = value
        elif key == "target_session_attrs" and value in _SESSIONS:
            properties["targetServerType"] = _SESSIONS[value]
        elif key == "host" and not hosts:
            hosts = value
        else:
            raise ConfigurationError(f"the DSN's parameter {key!r} has no counterpart in JDBC: leave it out here")
    for variable, name in _OF_ENVIRONMENT.items():
        if (value := os.environ.get(variable)) and name not in properties:
            properties[name] = value
    if not hosts or hosts.startswith(("/", "%2F", "%2f")):
        raise ConfigurationError(
            f"the DSN names no host, or a Unix socket, which JDBC cannot use: let Postgres listen on "
            f"localhost, {_EXAMPLE}"
        )
    database = unquote(parts.path.lstrip("/"))
    if not database:
        raise ConfigurationError(f"the DSN names no database: give {_EXAMPLE}")
    if not properties["user"]:
        raise ConfigurationError(f"the DSN names no user: give {_EXAMPLE}")
    # Where it is given conditions, Spark writes the names of properties in small letters, and the driver ignores those.
    named = {name: properties.pop(name) for name in list(properties) if name != name.lower()}
    query = urlencode(named, quote_via=quote, safe="")
    return Jdbc(f"jdbc:postgresql://{hosts}/{quote(database)}?{query}", properties)
