"""Settings of an executor and of its database connections. Durations are seconds."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import Field, SecretStr, field_validator
from pydantic_core import PydanticCustomError

from ..errors import ConfigurationError
from ..schema import check_dsn, valid_schema_name, without_account
from ..settings import Settings

__all__ = ["ExecutorSettings", "PostgresSettings"]


class PostgresSettings(Settings):
    """How to reach the service's database::

        PostgresSettings(dsn="postgresql://tracker@db/tracker", password=tokens.current, pool_size=20)

    Args:
        dsn: ``postgresql://user:password@host/database``.
        password: In place of the DSN's. For one that expires, as a cloud's tokens do: a plain function that gives that
            of the moment. Each new connection calls it, in the event loop or in the thread that renews leases: let it
            answer from memory. What it raises counts as Postgres being away.
        schema_name: Where Sidings' tables live; lower case, digits, underscores.
        pgbouncer: Set it when connections go through PgBouncer in transaction mode, or a proxy like it. Prepared
            statements and start-up parameters are not used then.
        connect_seconds: How long to wait for a connection.
        call_seconds: How long any single statement of ours may take before its connection is given up.
        pool_size: Transactions of ``service.transaction()`` at once. Consumers have connections beside these, half as
            many for messages that are tried alone.

    Raises:
        ConfigurationError: A value cannot work; the message names the field, and does not show a secret.
    """

    dsn: str
    password: SecretStr | Callable[[], str] | None = None
    schema_name: str = "sidings"
    pgbouncer: bool = False
    connect_seconds: float = Field(default=5.0, gt=0, le=1_000_000)
    call_seconds: float = Field(default=10.0, gt=0, le=1_000_000)  # Postgres' most is 2^31 ms
    pool_size: int = Field(default=10, ge=1, le=10_000)

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        shown = without_account(self.dsn)
        return [(name, shown if name == "dsn" else value) for name, value in super().__repr_args__()]

    @field_validator("password", mode="before")
    @classmethod
    def _text_or_function(cls, given: object) -> object:
        if given is None or isinstance(given, str | SecretStr) or callable(given):
            return given
        raise PydanticCustomError("password", "give a text, or a plain function that gives one")

    def check(self) -> None:
        """Look at the schema's name, the DSN's scheme and the kind of function.

        Raises:
            ConfigurationError: One of them cannot work.
        """
        valid_schema_name(self.schema_name)
        check_dsn(self.dsn, "PostgresSettings: dsn")
        if inspect.iscoroutinefunction(self.password):
            raise ConfigurationError(
                "PostgresSettings: password: an async function: give a plain one, which several event loops may call"
            )

    def secret(self) -> str | Callable[[], str] | None:
        """`password`, for asyncpg. A function's failure becomes that of a server that cannot be reached."""
        password = self.password
        if password is None:
            return None
        if isinstance(password, SecretStr):
            return password.get_secret_value()

        def of_now() -> str:
            try:
                return password()
            except Exception as error:
                raise ConnectionError(f"PostgresSettings: password: the function failed: {error!r}") from error

        return of_now


class ExecutorSettings(Settings):
    """How jobs run.

    Args:
        concurrency: Handlers that run at once. Of several types, a slow one has at most four fifths of them.
        lease_seconds: How long an origin stays ours without a renewal. A takeover after a kill takes that long.
        poll_seconds: How often to look for jobs that others enqueued without telling us.
        poison_after: A job with more losses than this is held instead of run.
        drain_seconds: How long a handler may go on after its partition was taken away; then it is cancelled.
        shutdown_seconds: How long handlers may go on at the end of the process; then they are cancelled. Those of
            messages have as long, but 5 s at most.
        exit_when_fenced: End the process (`os._exit`) when a lease would run out under a handler that cannot be
            stopped. Without it such a handler may overlap with its successor elsewhere; the database is fenced either
            way.
        stall_warn_seconds: An event loop that has not answered for so long is logged with its stack.
        stall_seconds: After so long without an answer of the event loop its leases are no longer renewed.
        history_days: How long `job_history` keeps attempts.
        notify: Tell other instances at once of jobs for their origins (`LISTEN`/`NOTIFY`, coalesced), instead of
            leaving them to their polling. Not through PgBouncer in transaction mode.
        audit_seconds: How long after the last time all waiting jobs are compared with what the reader has found.

    Raises:
        ConfigurationError: A value is out of bounds; the message names the field.
    """

    concurrency: int = Field(default=100, ge=1, le=10_000)
    lease_seconds: float = Field(default=15.0, ge=0.2, le=1_000_000)
    poll_seconds: float = Field(default=0.1, gt=0)
    poison_after: int = Field(default=5, ge=1)
    drain_seconds: float = Field(default=10.0, ge=0)
    shutdown_seconds: float = Field(default=20.0, ge=0)
    exit_when_fenced: bool = True
    stall_warn_seconds: float = Field(default=1.0, gt=0)
    stall_seconds: float = Field(default=30.0, gt=0)
    history_days: int = Field(default=30, ge=1, le=1_000_000)
    notify: bool = False
    audit_seconds: float = Field(default=60.0, gt=0)

    @property
    def margin_seconds(self) -> float:
        """What is taken off every lease on our own clock, for clocks that run at slightly different speeds."""
        return min(1.0, self.lease_seconds * 0.1)

    @property
    def soft_seconds(self) -> float:
        """How long before its deadline a lease that cannot be renewed makes us cancel its handlers."""
        return self.lease_seconds / 6
