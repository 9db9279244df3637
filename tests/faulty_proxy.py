"""A TCP proxy in front of Postgres that fails at a chosen moment of a chosen statement.

It reads the messages of the wire protocol (Parse names a statement, Bind uses it, ReadyForQuery ends its answer), so it
knows when "the cycle" is about to reach the server, and when it has been committed and only the answer is missing.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import urlsplit

__all__ = ["KINDS", "LATE_SECONDS", "FaultyProxy", "Moment", "proxied"]

# What tells our statements apart.
KINDS = {
    "cycle": re.compile(r"sidings\.begin_cycle\("),
    "standing": re.compile(r"SELECT e\.cycle, e\.fence"),
    "read": re.compile(r"pg_current_snapshot\(\) AS snapshot"),
    "acquire": re.compile(r"sidings\.acquire\("),
    "renew": re.compile(r"SET lease_until = clock_timestamp\(\)"),
    "release": re.compile(r"SET owner = NULL"),
    "promote": re.compile(r"promoted AS \("),
    "register": re.compile(r"INSERT INTO sidings\.executor"),
    "deregister": re.compile(r"DELETE FROM sidings\.executor"),
    "finish": re.compile(r"sidings\.finish\("),
    "begin": re.compile(r"^BEGIN"),
    "commit": re.compile(r"^COMMIT"),
    "limit": re.compile(r"^SET LOCAL idle_in_transaction_session_timeout"),
    "listen": re.compile(r"^LISTEN"),
    "doubt": re.compile(r"INSERT INTO sidings\.directory_doubt"),
    "receipts": re.compile(r"pg_xact_status"),
    "check": re.compile(r"sidings\.migration"),
    "attempts": re.compile(r"FROM sidings\.job_history\b.* at >= '", re.DOTALL),
    "close": re.compile(r"(?!)"),  # of a prepared statement: a message of its own
}


class Moment(Enum):
    """When a statement fails, and how."""

    BEFORE = "the connection is cut before the server sees it"
    AFTER = "the connection is cut after it has been committed, before the answer arrives"
    LATE = "the connection is cut, and the server sees it a little later: an orphan"
    KEPT = "the server sees it at `let_go`: its network, or its session's process, stands still"
    SLOW = "its answer takes its time"
    HELD = "its answer waits until `let_go`"
    SILENT_BEFORE = "the connection stays open, but nothing passes any more, this statement included"
    SILENT_AFTER = "the connection stays open, the statement is committed, and nothing passes any more"


LATE_SECONDS = 0.35


@dataclass
class Fault:
    """`left` statements of `kind` are still to fail at `moment`."""

    kind: str
    moment: Moment
    left: int
    hits: int = 0


@dataclass(eq=False)
class _Session:
    """One connection of a client and its counterpart."""

    client: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    server: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    statements: dict[bytes, str] = field(default_factory=dict)  # name -> kind
    started: bool = False  # the start-up message has no type byte
    swallow: bool = False  # from the server to the client nothing passes any more
    deaf: bool = False  # nor from the client to the server
    cut_at_ready: bool = False
    slow: bool = False
    held: bool = False
    answered: asyncio.Event = field(default_factory=asyncio.Event)  # the last statement

    def abort(self) -> None:
        for _, writer in (self.client, self.server):
            writer.transport.abort()


class FaultyProxy:
    """Use `proxied(dsn)`. `dsn` leads through the proxy; statements pass unharmed until a fault is armed."""

    def __init__(self, dsn: str) -> None:
        parts = urlsplit(dsn)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 5432)
        self._parts = parts
        self._server: asyncio.Server | None = None
        self._sessions: set[_Session] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.dsn = ""
        self.refusing = False
        self.silent = False
        self.waiting = 0  # connections that are held
        self.answered_bytes = 0  # what the server has sent and has been passed on
        self._passing = asyncio.Event()
        self._passing.set()
        self._answering = asyncio.Event()
        self.faults: list[Fault] = []

    def arm(self, kind: str, moment: Moment, times: int = 1) -> Fault:
        """Let the next `times` statements of `kind` fail."""
        assert kind in KINDS
        if moment in (Moment.HELD, Moment.KEPT):
            self._answering.clear()
        self.faults.append(Fault(kind, moment, times))
        return self.faults[-1]

    def cut(self) -> None:
        """Cut all connections now, and refuse new ones until `heal`."""
        self.refusing = True
        for session in list(self._sessions):
            session.abort()

    def silence(self) -> None:
        """From now on no byte passes, on no connection; new ones are accepted and not answered. Until `heal`."""
        self.silent = True

    def heal(self) -> None:
        """Work again. Connections that have swallowed something are cut, as by a router that came back."""
        self.refusing = self.silent = False
        for session in list(self._sessions):
            if session.swallow or session.deaf:
                session.abort()

    def hold(self) -> None:
        """New connections are accepted and lead nowhere until `pass_on`."""
        self._passing.clear()

    def pass_on(self) -> None:
        """Held and new connections lead to the server."""
        self._passing.set()

    def let_go(self) -> None:
        """Pass on the answers that are held and the statements that are kept, and those that were to be."""
        self._answering.set()

    def switch(self, dsn: str) -> None:
        """New connections lead to another server, those that are held included."""
        parts = urlsplit(dsn)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 5432)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        account = self._parts.netloc.rpartition("@")[0]
        self.dsn = self._parts._replace(netloc=f"{account}@127.0.0.1:{port}", query="sslmode=disable").geturl()

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for session in list(self._sessions):
            session.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self.refusing:
            writer.transport.abort()
            return
        self.waiting += 1
        try:
            await self._passing.wait()
            self.waiting -= 1
            upstream = await asyncio.open_connection(*self._upstream)
        except (OSError, asyncio.CancelledError):  # cancelled by `stop` only
            writer.transport.abort()
            return
        session = _Session((reader, writer), upstream)
        if self.refusing:  # since it was accepted
            session.abort()
            return
        self._sessions.add(session)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._to_server(session))
                group.create_task(self._to_client(session))
        except* (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # cancelled by `stop` only, which waits for the end
        finally:
            session.abort()
            self._sessions.discard(session)

    async def _to_server(self, session: _Session) -> None:
        reader, writer = session.client[0], session.server[1]
        while True:
            message = await _message(reader, typed=session.started)
            if not session.started:
                session.started = message[4:8] != b"\x04\xd2\x16\x2f"  # not an SSLRequest
            elif message[:1] == b"P":
                name, query = message[5:].split(b"\0", 2)[:2]
                session.statements[name] = _kind(query.decode())
            elif message[:1] == b"B":
                if await self._execute(session, session.statements.get(message[5:].split(b"\0", 2)[1], ""), message):
                    continue
            elif message[:1] in (b"Q", b"C"):
                kind = "close" if message[:1] == b"C" else _kind(message[5:-1].decode())
                if await self._execute(session, kind, message):
                    continue
            if self.silent:
                session.deaf = session.swallow = True
            if not session.deaf:
                writer.write(message)
                await writer.drain()

    async def _execute(self, session: _Session, kind: str, message: bytes) -> bool:
        """A statement of this kind is about to be sent; `message` begins it. Returns whether it has been sent here."""
        fault = next((fault for fault in self.faults if fault.kind == kind and fault.left > 0), None)
        if fault is None:
            return False
        fault.left -= 1
        match fault.moment:
            case Moment.BEFORE:
                fault.hits += 1
                raise ConnectionAbortedError
            case Moment.AFTER:
                session.swallow = session.cut_at_ready = True
            case Moment.LATE:
                await self._send_late(session, await _whole(session, message), fault)
                raise ConnectionAbortedError
            case Moment.KEPT:
                message = await _whole(session, message)
                fault.hits += 1
                await self._answering.wait()
                session.server[1].write(message)
                session.answered.clear()
                await session.answered.wait()  # also if its client has gone meanwhile, for which the session ends
                return True
            case Moment.SLOW:
                session.slow = True
            case Moment.HELD:
                session.held = True
            case Moment.SILENT_BEFORE:
                session.deaf = session.swallow = True
            case Moment.SILENT_AFTER:
                session.swallow = True
        fault.hits += 1
        return False

    async def _send_late(self, session: _Session, messages: bytes, fault: Fault) -> None:
        """What the client has sent reaches the server long after the client was told that the connection is gone."""
        session.swallow = session.cut_at_ready = True
        session.client[1].transport.abort()
        await asyncio.sleep(LATE_SECONDS)
        session.server[1].write(messages)
        while not session.server[1].transport.is_closing():
            await asyncio.sleep(0.02)
        fault.hits += 1

    async def _to_client(self, session: _Session) -> None:
        reader, writer = session.server[0], session.client[1]
        while True:
            message = await _message(reader, typed=True)
            if message[:1] == b"Z":
                session.answered.set()
            if self.silent:
                session.swallow = True
            if session.slow:
                session.slow = False
                await asyncio.sleep(LATE_SECONDS)
            if session.held:
                session.held = False
                await self._answering.wait()
            if not session.swallow:
                writer.write(message)
                self.answered_bytes += len(message)
                await writer.drain()
            elif session.cut_at_ready and message[:1] == b"Z":
                session.abort()
                return


async def _message(reader: asyncio.StreamReader, *, typed: bool) -> bytes:
    head = await reader.readexactly(5 if typed else 4)
    return head + await reader.readexactly(int.from_bytes(head[-4:]) - 4)


async def _whole(session: _Session, message: bytes) -> bytes:
    """A statement that begins with this message."""
    while message[:1] in (b"B", b"C") and message[-5:] != b"S\0\0\0\4":  # up to Sync
        message += await _message(session.client[0], typed=True)
    return message


def _kind(query: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if pattern.search(query)), "")


@asynccontextmanager
async def proxied(dsn: str) -> AsyncIterator[FaultyProxy]:
    """A proxy in front of the server of `dsn`."""
    proxy = FaultyProxy(dsn)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
