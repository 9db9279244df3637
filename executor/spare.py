"""Connections of transactional handlers: those that no job needs at the moment, and how more are asked for."""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable
from math import inf

import asyncpg

from ..errors import PostgresUnavailable
from ..outage import Outage
from .clock import now
from .queues import OriginQueue

__all__ = ["Room", "SpareConnections"]

log = logging.getLogger("sidings.executor")

_KEEP_SECONDS = 5.0  # how long a connection is kept that no job has needed; the server has not many
_WAIT_SECONDS = 1.0  # how long a job waits for one, where the server gives no more
_YIELD_SECONDS = 3.0  # for which nobody asks, where the executor itself needs one: it tries again within two
_MORE_SECONDS = 60.0  # until one more transaction is tried, where there was no room for so many
_LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.1, 2.0  # between questions for more


class SpareConnections:
    """connect: opens another one; raises `PostgresUnavailable`.

    Where the server, or this process's limit of files, gives no more, one job at a time asks, ever more rarely, and the
    others wait for what one of them gives back: each connection that is refused costs the server a process, and there
    may be a hundred such instances just when it has none left.
    """

    def __init__(self, connect: Callable[[], Awaitable[asyncpg.Connection]]) -> None:
        self.outage = Outage(log, "connections for transactional jobs could not be had")
        self.refused_at = -inf  # when the last one was
        self._connect = connect
        self._idle: list[asyncpg.Connection] = []
        self._spare = 0  # so many of them, the first ones, nobody has needed since the timer was set
        self._timer: asyncio.TimerHandle | None = None
        self._scarce = False  # there are no more for the time being
        self._ask_at = -inf  # when the next may be asked for then
        self._refusals = 0  # one after the other
        self._refusal = ""  # the last one
        self._owed = False  # the next that is given back is for the executor itself
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> asyncpg.Connection:
        """A connection. Raises `PostgresUnavailable`."""
        until = now() + _WAIT_SECONDS
        while True:
            while self._idle:
                connection = self._idle.pop()
                self._spare = min(self._spare, len(self._idle))
                if not connection.is_closed():
                    return connection
            time = now()
            if not self._scarce or time >= self._ask_at:
                return await self._ask()
            if time >= until:
                raise PostgresUnavailable(self._refusal)
            await self._wait(min(until, self._ask_at) - time)

    async def _ask(self) -> asyncpg.Connection:
        asked, self._ask_at = now(), inf  # for the others, if there are no more
        try:
            connection = await self._connect()
        except BaseException as error:
            if isinstance(error, PostgresUnavailable):
                self._scarce, self.refused_at = True, now()
                self._refusals, self._refusal = self._refusals + 1, str(error)
                self.outage.failed(error)
            pause = min(_LEAST_PAUSE_SECONDS * 2.0 ** min(self._refusals, 10), _MOST_PAUSE_SECONDS)
            self._ask_at = now() + random.uniform(_LEAST_PAUSE_SECONDS, pause)
            raise
        self._ask_at = -inf
        if asked > self.refused_at:
            self._refusals = 0
            if not self._waiting:  # else one after the other, still
                self._scarce = False
                self.outage.over()
        self._wake()
        return connection

    async def _wait(self, seconds: float) -> None:
        """Until one is given back, or another may be asked for."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            await asyncio.wait([waiting], timeout=seconds)
        except asyncio.CancelledError:
            if waiting.done():
                self._wake()
            raise
        finally:
            if not waiting.done():
                self._waiting.remove(waiting)

    def _wake(self) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(None)

    def keep(self, connection: asyncpg.Connection) -> None:
        """For the next job; one that comes soon. Its session is as a new one."""
        if self._owed:
            self._owed = False
            connection.terminate()
            return
        self._idle.append(connection)
        self._wake()
        if self._timer is None:
            self._spare = len(self._idle)
            self._timer = asyncio.get_running_loop().call_later(_KEEP_SECONDS, self._let_go)

    def _let_go(self) -> None:
        """Of as many as have not been needed: the last ones are taken first, so it is the first ones."""
        spare = min(self._spare, len(self._idle))
        for connection in self._idle[:spare]:
            connection.terminate()
        del self._idle[:spare]
        self._spare, self._timer = len(self._idle), None
        if self._idle:
            self._timer = asyncio.get_running_loop().call_later(_KEEP_SECONDS, self._let_go)

    def forget(self) -> None:
        """The server was replaced: those that wait here may still lead to the former one. Or the executor itself has
        lost one of its connections, and may not get another while the server has no more to give: without it nothing
        begins or ends."""
        if self._scarce:
            self._owed = not self._idle
            self._ask_at = now() + _YIELD_SECONDS
        while self._idle:
            self._idle.pop().terminate()

    def close(self) -> None:
        """Close those that are idle."""
        self.forget()
        if self._timer is not None:
            self._timer.cancel()


class Room:
    """How many transactions handlers may have open at once through PgBouncer, which refuses no connection: where they
    have all that it has to the server, whatever else is asked waits, so no lease is renewed. Without limit at first."""

    def __init__(self) -> None:
        self._most = inf
        self._inside = 0
        self._changed_at = -inf
        self._waiting: dict[asyncio.Future[bool], OriginQueue] = {}  # in their order

    async def enter(self, origin: OriginQueue) -> bool:
        """Wait until there is room for one more, of this origin; False: it is not to begin. Places are handed on, in
        order: a worker that has left one asks for its next job before anybody else is awake."""
        if self._inside < self._most:
            self._inside += 1
            return True
        waiting: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = origin
        try:
            return await waiting
        except asyncio.CancelledError:
            self._waiting.pop(waiting, None)
            if not waiting.cancelled() and waiting.result():  # it was given one
                self.leave()
            raise

    def turn_away(self, origin: OriginQueue | None) -> None:
        """Of this origin, or of any, none that waits now is to begin."""
        for waiting in [w for w, its in self._waiting.items() if origin is None or its is origin]:
            del self._waiting[waiting]
            if not waiting.done():
                waiting.set_result(False)

    def leave(self) -> None:
        """After `enter`."""
        self._inside -= 1
        if now() - self._changed_at > _MORE_SECONDS:
            self._most, self._changed_at = self._most + 1, now()
        self._hand_on()

    def lessen(self, begun: int) -> None:
        """The executor had no answer while so many transactions were open: from now on there are fewer."""
        if begun and now() - self._changed_at > _YIELD_SECONDS:
            self._most, self._changed_at = max(1, min(self._most, begun) * 3 // 4), now()
            log.warning(
                "the executor has had no answer while %s transactional jobs ran: at most %s at once from now on, in "
                "case PgBouncer has no more connections to the server (default_pool_size)",
                begun,
                self._most,
            )

    def _hand_on(self) -> None:
        while self._waiting and self._inside < self._most:
            waiting = next(iter(self._waiting))
            del self._waiting[waiting]
            if not waiting.done():  # it was cancelled
                self._inside += 1
                waiting.set_result(True)
