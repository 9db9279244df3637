"""Passwords that are not in the DSN, and those that expire."""

import logging
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from sidings import ConfigurationError, Job, PostgresSettings, PostgresUnavailable, Service, StaticAssignment
from sidings.executor import connect
from sidings.kafka.environment import environment

from .support import ORIGIN, a_role, connected, eventually


class Account:
    """A role whose password changes, and what a program knows of it."""

    def __init__(self, database: str, role: str, dsn: str) -> None:
        self.database = database
        self.role = role
        self.dsn = dsn
        self.password = "geheim-1"
        self.asked = 0

    def current(self) -> str:
        self.asked += 1
        if not self.password:
            raise LookupError("no token")
        return self.password

    async def expire(self, password: str) -> None:
        """From now on another one counts, and no connection is left that was made with the former."""
        async with connected(self.database) as admin:
            await admin.execute(f"ALTER ROLE {self.role} PASSWORD '{password}'")
            await admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1", self.role)


@pytest.fixture
async def account(database: str) -> AsyncIterator[Account]:
    async with a_role(database, password="geheim-1") as (role, dsn):
        yield Account(database, role, dsn.replace(":geheim-1@", "@"))


async def test_each_new_connection_asks_for_the_password_of_the_moment(
    account: Account, caplog: pytest.LogCaptureFixture
) -> None:
    postgres = PostgresSettings(dsn=account.dsn, password=account.current)
    service = Service("test", postgres=postgres, assignment=StaticAssignment([ORIGIN]), prometheus=CollectorRegistry())
    plain, transactional = list[int](), list[int]()

    @service.job()
    async def move(job: Job[int]) -> None:
        plain.append(job.payload)

    @service.job(transactional=True)
    async def pay(job: Job[int]) -> None:
        await job.tx.execute("SELECT 1")
        transactional.append(job.payload)

    async def ordered(number: int) -> bool:
        try:
            async with service.transaction() as tx:
                await move.enqueue(tx, number, origin=ORIGIN)
                await pay.enqueue(tx, number, origin=ORIGIN)
        except PostgresUnavailable:  # over a connection that has just been ended
            return False
        return True

    caplog.set_level(logging.DEBUG, "sidings")  # the first failure may be that of a connection that has been ended
    await service.migrate()
    async with service:
        await eventually(lambda: ordered(1))
        await eventually(lambda: (plain, transactional) == ([1], [1]))
        account.password = ""
        await account.expire("geheim-2")
        asked = account.asked
        await eventually(lambda: account.asked >= asked + 15)
        assert "password: the function failed: LookupError('no token')" in caplog.text
        told = Counter(
            record.getMessage().partition(":")[0]
            for record in caplog.records
            if record.levelno >= logging.WARNING and "trying again" in record.getMessage()
        )
        assert told.total() == len(told), "each loop speaks once, not at each try"
        account.password = "geheim-2"
        await eventually(lambda: ordered(2))
        await eventually(lambda: (plain, transactional) == ([1, 2], [1, 2]))


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://me:geheim@db/x",
        "postgresql://me:geheim?1@db/x",
        "postgresql://db/x?user=me@db&password=geheim",
        "postgresql://me:geheim\n@db/x",  # as `echo geheim | base64` gives it; asyncpg takes the line break away
    ],
)
def test_settings_do_not_show_the_password_of_their_dsn(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood in whatever shows the variables of a traceback, as pytest and error reporters do."""
    monkeypatch.setenv("SIDINGS_POSTGRES", dsn)
    for settings in (PostgresSettings(dsn=dsn), environment()):
        assert "geheim" not in f"{settings!r} {settings}"


async def test_a_password_stands_for_the_one_of_the_dsn(account: Account, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIDINGS_POSTGRES", account.dsn.replace("@", ":wrong@"))
    monkeypatch.setenv("SIDINGS_POSTGRES_PASSWORD", "geheim-1")
    assert "geheim-1" not in repr(environment())
    service = Service("test", postgres=environment()["postgres"], prometheus=CollectorRegistry())
    assert await service.migrate() == []
    connection = await connect(environment()["postgres"])
    assert await connection.fetchval("SELECT current_user") == account.role
    await connection.close()


def test_an_async_function_is_refused_at_once() -> None:
    async def token() -> str:
        return "x"

    with pytest.raises(ConfigurationError, match="password: an async function: give a plain one"):
        PostgresSettings(dsn="postgresql://localhost/x", password=token)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "dsn", ["postgresql://u@127.0.0.1/db?sslmode=verify-ca&sslrootcert={}", "postgresql://u@/db?host={}"]
)
async def test_a_file_that_the_dsn_names_and_that_is_not_there_is_told_of(tmp_path: Path, dsn: str) -> None:
    """It said: No such file or directory."""
    with pytest.raises(
        PostgresUnavailable, match=r"a file that the DSN names is not there: the socket in host=, or that"
    ):
        await connect(PostgresSettings(dsn=dsn.format(tmp_path / "nothing")))
