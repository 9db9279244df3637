"""Processes that handlers fork: they have no part in the connections, and end where they come out of the handler."""

import logging
import os
from contextlib import suppress
from weakref import WeakSet

import asyncpg

__all__ = ["end_if_forked", "forks_so_far", "keep_from_children"]

log = logging.getLogger("sidings.executor")

_forks = 0  # since the interpreter has started; to ask the system who one is takes a quarter of a microsecond a job

_connections: WeakSet[asyncpg.Connection] = WeakSet()


def _forked() -> None:
    global _forks
    _forks += 1
    nothing = os.open(os.devnull, os.O_RDWR)
    for connection in list(_connections):
        with suppress(Exception):  # of one that is just being closed, say: the others have to be taken away, too
            if not connection.is_closed():
                # In its place, not closed: who still has its number would close what comes to have it.
                os.dup2(nothing, connection._transport.get_extra_info("socket").fileno())
    os.close(nothing)


os.register_at_fork(after_in_child=_forked)


async def keep_from_children(connection: asyncpg.Connection) -> None:
    """Take this connection from each process that is forked from now on. The server would not notice that this one has
    been killed while such a child lives: a transaction would stay open, and keep its locks."""
    _connections.add(connection)


def forks_so_far() -> int:
    """How many forks lie between the interpreter's start and this process: what `end_if_forked` compares with."""
    return _forks


def end_if_forked(forks: int, error: BaseException | None = None) -> None:
    """End this process if it is not the one that has called a handler, but a child of it: as where `os.exec` fails, or
    `sys.exit` is to end it. With its copy of the event loop and of the connections it would be a second executor.

    forks: as many as there were when it was called. error: what it has raised.
    """
    if _forks == forks:
        return
    if not isinstance(error, SystemExit):
        log.error("a process that a handler has forked has come out of the handler, and ends", exc_info=error)
    code = error.code if isinstance(error, SystemExit) else 1
    os._exit(code if isinstance(code, int) else int(code is not None))
