"""Every kind of connection that jobs and messages can be stored through, behind one port: one suite tests them all."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import django
import django.db
import psycopg
import sqlalchemy
from django.conf import settings as django_settings
from django.db import transaction as django_transaction
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

WAYS = [
    "asyncpg",
    "psycopg",
    "psycopg sync",
    "sqlalchemy asyncpg AsyncConnection",
    "sqlalchemy asyncpg AsyncSession",
    "sqlalchemy psycopg AsyncConnection",
    "sqlalchemy psycopg AsyncSession",
    "sqlalchemy psycopg Connection",
    "sqlalchemy psycopg Session",
    "django",
]


class Way:
    """One connection. `do` runs a function of it where it belongs: in the event loop, or in a thread of its own."""

    def __init__(self, connection: Any, pool: ThreadPoolExecutor | None = None) -> None:
        self.connection = connection
        self.pool = pool

    @property
    def synchronous(self) -> bool:
        return self.pool is not None

    async def do(self, function: Callable[[], Any]) -> Any:
        if self.pool is not None:
            return await asyncio.get_running_loop().run_in_executor(self.pool, function)
        return await function()

    async def begin(self) -> None:
        """Open a transaction where the library does not do that by itself."""
        if isinstance(self.connection, asyncpg.Connection):
            await self.connection.execute("BEGIN")
        elif self.connection is django.db.connection:
            self._atomic: Any = django_transaction.atomic()
            await self.do(self._atomic.__enter__)

    async def execute(self, query: str) -> None:
        if self.connection is django.db.connection:
            await self.do(lambda: self.connection.cursor().execute(query))
        else:
            text = sqlalchemy.text(query) if hasattr(self.connection, "get_bind") or self._alchemy else query
            await self.do(lambda: self.connection.execute(text))

    async def end(self, ending: str) -> None:
        """COMMIT or ROLLBACK."""
        if isinstance(self.connection, asyncpg.Connection):
            await self.connection.execute(ending)
        elif self.connection is django.db.connection:
            error = None if ending == "COMMIT" else ValueError("roll back")
            await self.do(lambda: self._atomic.__exit__(type(error) if error else None, error, None))
        else:
            await self.do(self.connection.commit if ending == "COMMIT" else self.connection.rollback)

    async def enqueue(self, job_type: Any, payload: Any, **options: Any) -> int:
        call = job_type.enqueue_sync if self.synchronous else job_type.enqueue
        return await self.do(lambda: call(self.connection, payload, **options))

    async def enqueue_many(self, job_type: Any, payloads: Any, **options: Any) -> list[int]:
        call = job_type.enqueue_many_sync if self.synchronous else job_type.enqueue_many
        return await self.do(lambda: call(self.connection, payloads, **options))

    async def withdraw(self, job_type: Any, *args: Any, **options: Any) -> bool:
        call = job_type.withdraw_sync if self.synchronous else job_type.withdraw
        return await self.do(lambda: call(self.connection, *args, **options))

    async def publish(self, outbox: Any, *args: Any, **options: Any) -> Any:
        call = outbox.publish_sync if self.synchronous else outbox.publish
        return await self.do(lambda: call(self.connection, *args, **options))

    async def publish_many(self, outbox: Any, *args: Any, **options: Any) -> Any:
        call = outbox.publish_many_sync if self.synchronous else outbox.publish_many
        return await self.do(lambda: call(self.connection, *args, **options))

    @property
    def _alchemy(self) -> bool:
        return type(self.connection).__module__.startswith("sqlalchemy")


@asynccontextmanager
async def opened(name: str, dsn: str, *, autocommit: bool = False) -> AsyncIterator[Way]:
    """A connection of that kind; autocommit: one that nobody may enqueue through."""
    url = dsn.partition("://")[2]
    isolation: Any = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
    match name.split():
        case ["asyncpg"]:
            connection = await asyncpg.connect(dsn)
            try:
                yield Way(connection)
            finally:
                connection.terminate()
        case ["psycopg"]:
            connection = await psycopg.AsyncConnection.connect(dsn, autocommit=autocommit)
            try:
                yield Way(connection)
            finally:
                await connection.close()
        case ["psycopg", "sync"]:
            with ThreadPoolExecutor(1) as pool:
                way = Way(psycopg.connect(dsn, autocommit=autocommit), pool)
                try:
                    yield way
                finally:
                    way.connection.close()
        case ["sqlalchemy", driver, kind] if kind.startswith("Async"):
            engine = create_async_engine(f"postgresql+{driver}://{url}", **isolation)
            try:
                async with engine.connect() if kind == "AsyncConnection" else AsyncSession(engine) as connection:
                    yield Way(connection)
            finally:
                await engine.dispose()
        case ["sqlalchemy", driver, kind]:
            engine = sqlalchemy.create_engine(f"postgresql+{driver}://{url}", **isolation)
            with ThreadPoolExecutor(1) as pool:
                way = Way(engine.connect() if kind == "Connection" else Session(engine), pool)
                try:
                    yield way
                finally:
                    await way.do(way.connection.close)
                    engine.dispose()
        case ["django"]:
            with ThreadPoolExecutor(1, initializer=use_django, initargs=(dsn,)) as pool:
                way = Way(django.db.connection, pool)
                try:
                    yield way
                finally:
                    await way.do(lambda: way.connection.close())
        case _:
            raise ValueError(name)


def use_django(dsn: str) -> None:
    """Django's default database is `dsn` in this thread; its connections are one per thread."""
    if not django_settings.configured:
        django_settings.configure(USE_TZ=True)
        django.setup()
    parts: Any = conninfo_to_dict(dsn)
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts["dbname"],
        "USER": parts["user"],
        "PASSWORD": parts.get("password", ""),
        "HOST": parts["host"],
        "PORT": str(parts["port"]),
    }
    django.db.connections.settings = django.db.connections.configure_settings({"default": database})
