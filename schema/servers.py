"""Connections to one of several servers, as a DSN with several hosts names them."""

import asyncio
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg

from .refusals import refused_option, refused_settings

__all__ = ["connect_any"]

Attempt = asyncio.Task[asyncpg.Connection]

# As asyncpg, which goes on to the next server then: it does not answer, it starts, it is a standby.
_NOT_THIS_ONE = (OSError, asyncpg.CannotConnectNowError, asyncpg.TargetServerAttributeNotMatched)


async def connect_any(dsn: str, *, timeout: float, **options: Any) -> asyncpg.Connection:
    """`asyncpg.connect`, but of several servers each has its share of `timeout` to answer. asyncpg gives them one limit
    together: one that hangs, as a primary whose machine is gone, would keep us from its successor, for ever. When its
    share is over it is still waited for, beside the next: it may be slow, and the only one that is any good.

    Raises what asyncpg does; `ConfigurationError` where a server, or a pooler, refuses an option of the DSN's, or the
    `server_settings` among `options`."""
    try:
        return await _connect_any(dsn, timeout, options)
    except asyncpg.PostgresError as error:
        told = refused_option(dsn, error)
        if told is None and options.get("server_settings"):
            told = refused_settings(error)
        if told is None:
            raise
        raise told from error


async def _connect_any(dsn: str, timeout: float, options: dict[str, Any]) -> asyncpg.Connection:
    servers = _one_by_one(dsn)
    if len(servers) == 1:
        return await asyncpg.connect(dsn, timeout=timeout, **options)
    clock = asyncio.get_running_loop().time
    until = clock() + timeout
    tried, under_way = list[Attempt](), set[Attempt]()
    try:
        for left, server in zip(range(len(servers), 0, -1), servers, strict=True):
            rest = max(0.001, until - clock())
            next_at = clock() + rest / left
            tried.append(asyncio.create_task(asyncpg.connect(server, timeout=rest, **options)))
            under_way.add(tried[-1])
            while under_way and (left == 1 or (tried[-1] in under_way and clock() < next_at)):
                pause = None if left == 1 else next_at - clock()
                ended, _ = await asyncio.wait(under_way, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                for attempt in ended:
                    under_way.remove(attempt)
                    with suppress(*_NOT_THIS_ONE):
                        return attempt.result()
        return tried[-1].result()  # which raises its error
    finally:
        for attempt in under_way:
            attempt.cancel()
            attempt.add_done_callback(_drop)


def _drop(attempt: Attempt) -> None:
    if not attempt.cancelled() and attempt.exception() is None:
        attempt.result().terminate()


def _one_by_one(dsn: str) -> list[str]:
    """A DSN for each of its hosts. Not where the choice is between all of them, or hosts stand elsewhere in it."""
    parts = urlsplit(dsn)
    account, at, hosts = parts.netloc.rpartition("@")
    query = parse_qs(parts.query)
    if query.keys() & {"host", "port", "service"} or query.get("target_session_attrs") == ["prefer-standby"]:
        return [dsn]
    return [parts._replace(netloc=f"{account}{at}{host}").geturl() for host in hosts.split(",")]
