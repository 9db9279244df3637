"""Connections to one of several servers, as a DSN with several hosts names them."""

import asyncio
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg

__all__ = ["connect_any"]

# As asyncpg, which goes on to the next server then: it does not answer, it starts, it is a standby.
_NOT_THIS_ONE = (OSError, asyncpg.CannotConnectNowError, asyncpg.TargetServerAttributeNotMatched)


async def connect_any(dsn: str, *, timeout: float, **options: Any) -> asyncpg.Connection:
    """`asyncpg.connect`, but of several servers each has its share of `timeout` to answer. asyncpg gives them one limit
    together: one that hangs, as a primary whose machine is gone, would keep us from its successor, for ever."""
    servers = _one_by_one(dsn)
    clock = asyncio.get_running_loop().time
    until = clock() + timeout
    for left, server in zip(range(len(servers), 0, -1), servers, strict=True):
        share = max(0.001, (until - clock()) / left)
        try:
            return await asyncpg.connect(server, timeout=share, **options)
        except _NOT_THIS_ONE:
            if left == 1:
                raise
    raise AssertionError


def _one_by_one(dsn: str) -> list[str]:
    """A DSN for each of its hosts. Not where the choice is between all of them, or hosts stand elsewhere in it."""
    parts = urlsplit(dsn)
    account, at, hosts = parts.netloc.rpartition("@")
    query = parse_qs(parts.query)
    if query.keys() & {"host", "port", "service"} or query.get("target_session_attrs") == ["prefer-standby"]:
        return [dsn]
    return [parts._replace(netloc=f"{account}{at}{host}").geturl() for host in hosts.split(",")]
