"""The lease thread: renews every lease, whatever the event loop of the service is doing."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol
from uuid import UUID

import asyncpg

from ..errors import PostgresUnavailable
from ..outage import Outage
from ..schema import int_array, load_sql
from ..waiting import set_within, unless_set
from .clock import now
from .link import Link
from .settings import ExecutorSettings, PostgresSettings

__all__ = ["LeaseEvents", "LeaseThread", "Leased", "tell_loop"]

log = logging.getLogger("sidings.executor")


class Leased(Protocol):
    """What is leased: an origin of the executor's, a slot of the outbox. timeline: of the server that has granted it;
    None: it is not known."""

    name: str
    epoch: int
    deadline: float
    timeline: str | None


@dataclass(frozen=True, slots=True)
class LeaseEvents:
    """What the thread reports; called in the event loop of the service.

    lost: the database says that somebody else has these origins; their epochs. wanted: an executor with an assignment
    of that Kafka generation waits for it. replaced: another server answers, of a newer timeline than the one that
    granted a lease.
    """

    lost: Callable[[Mapping[str, int]], None]
    wanted: Callable[[str, int], None]
    replaced: Callable[[], None]


class LeaseThread:
    """Renews the leases every third of their time, over a connection of its own.

    Deadlines count from the sending of a renewal, minus a margin. `suspended` is set by the watchdog when the event
    loop has not answered for too long: a hung process must not keep its partitions. stalled: asked before each renewal,
    where there is no watchdog.
    """

    def __init__(
        self,
        postgres: PostgresSettings,
        settings: ExecutorSettings,
        events: LeaseEvents,
        on_error: Callable[[], None],
        stalled: Callable[[], bool] = lambda: False,
    ) -> None:
        self.executor_id: UUID | None = None
        self.suspended = False
        self.last_renewed = now()
        self.outage = Outage(log, "leases could not be renewed")
        self._postgres = postgres
        self._settings = settings
        self._events = events
        self._on_error = on_error
        self._stalled = stalled
        self._held: dict[str, Leased] = {}
        self._lock = threading.Lock()
        self._sql = load_sql(__package__, "renew", postgres.schema_name)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._home: asyncio.AbstractEventLoop | None = None
        self._poke: asyncio.Event | None = None
        self._ending: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._locked = frozenset[str]()  # whose rows somebody had locked at the last turn

    def start(self) -> None:
        """Start the thread. Call it in the event loop that is to get the events."""
        self._home = asyncio.get_running_loop()
        self.last_renewed = now()  # there was nothing to renew before, however long ago this was made
        self._thread = threading.Thread(target=self._live, name="sidings leases", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread, also where it waits for a server that hangs. Leases are left as they are."""
        self._stopping = True
        self.renew_soon()
        if self._loop is not None and self._ending is not None:
            tell_loop(self._loop, self._ending.set)
        until = now() + 2 * self._postgres.connect_seconds
        # Not by `to_thread`: what handlers have begun with that may keep all of its threads.
        while self._thread is not None and self._thread.is_alive() and now() < until:
            await asyncio.sleep(0.005)

    def hold(self, queues: Iterable[Leased]) -> None:
        """Keep these leases from now on."""
        with self._lock:
            self._held.update((queue.name, queue) for queue in queues)

    def drop(self, name: str) -> None:
        """Renew this lease no more."""
        with self._lock:
            self._held.pop(name, None)

    def held(self) -> list[Leased]:
        """The origins whose leases are kept."""
        with self._lock:
            return list(self._held.values())

    def renew_soon(self) -> None:
        """Renew now instead of at the next turn."""
        if self._loop is not None and self._poke is not None:
            tell_loop(self._loop, self._poke.set)

    def _live(self) -> None:
        """Without this thread every lease runs out, for good. It may lack files for its event loop, and what somebody
        has hung into the log may raise."""
        outage = Outage(log, "the thread that renews leases has failed")
        while not self._stopping:
            try:
                asyncio.run(self._run())
            except Exception as error:  # noqa: BLE001 - it is logged, if that is possible
                with suppress(Exception):
                    outage.failed(repr(error))
                time.sleep(self._settings.lease_seconds / 15)

    async def _run(self) -> None:
        self._loop, self._poke, self._ending = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        # A call must not outlast the lease: better to try again over another connection.
        patience = max(0.2, self._settings.lease_seconds / 3)
        link = Link(
            self._postgres.model_copy(
                update={
                    "call_seconds": min(self._postgres.call_seconds, patience),
                    "connect_seconds": min(self._postgres.connect_seconds, patience),
                }
            ),
            self._on_error,
        )
        pause = self._settings.lease_seconds / 3
        while not self._stopping:
            await set_within(self._poke, pause)
            self._poke.clear()
            pause = self._settings.lease_seconds / 15
            if self.suspended or self._stopping or self._stalled():
                continue
            began = now()
            try:
                answer = await unless_set(self._ending, self._renew(link))
                if answer:
                    self.outage.over()
                complete = answer is not False
            except (PostgresUnavailable, asyncpg.PostgresError) as error:
                self.outage.failed(error)
                complete = False
            except Exception as error:  # PgBouncer for Postgres, a defect: without this thread every lease runs out
                self.outage.failed(repr(error))
                log.exception("leases could not be renewed")
                complete = False
            if complete:
                pause = self._settings.lease_seconds / 3
            else:  # after one that hung, at once: by default its 5 s leave 1.5 until handlers are cancelled
                pause = max(0.0, pause - (now() - began))
        await link.close()

    async def _renew(self, link: Link) -> bool | None:
        """Whether all leases were renewed: those whose rows are locked are tried again soon. None: there are none, so
        Postgres was not asked, and may still be away."""
        held, me = self.held(), self.executor_id
        if not held or me is None:
            self.last_renewed = now()
            return None
        by_name = {queue.name: queue for queue in held}
        names = sorted(by_name)
        sent = now()
        deadline = sent + self._settings.lease_seconds - self._settings.margin_seconds
        lease = timedelta(seconds=self._settings.lease_seconds)
        epochs = int_array([by_name[name].epoch for name in names])
        rows = await link.fetch(self._sql, me, names, epochs, lease)
        locked = set[str]()
        timeline: str = rows[0]["timeline"]
        elsewhere = [queue.timeline for queue in held if queue.timeline not in (None, timeline)]
        if elsewhere:  # what it has done to leases of the same names and epochs says nothing about ours
            link.drop()
            log.warning("leases of timeline %s could not be renewed: timeline %s answers", max(elsewhere), timeline)
            if timeline > max(elsewhere) and self._home is not None:
                tell_loop(self._home, self._events.replaced)
            return False
        lost: dict[str, int] = {}
        for row in rows:
            queue = by_name[row["origin"]]
            if row["renewed"]:
                queue.deadline = deadline
            elif row["held"]:
                locked.add(queue.name)
            else:
                lost[queue.name] = queue.epoch
            if row["wanted_generation"] is not None and self._home is not None:
                tell_loop(self._home, self._events.wanted, queue.name, row["wanted_generation"])
        if lost:
            if self._home is not None:
                tell_loop(self._home, self._events.lost, lost)
            link.drop()  # it may lead to a former primary that the others have left
        if not locked:
            self.last_renewed = sent
        elif still := locked & self._locked:  # not of a takeover that has just met this one
            names = ", ".join(sorted(still)[:5])
            self.outage.failed(f"another transaction keeps rows of {self._postgres.schema_name}.origin locked: {names}")
        self._locked = frozenset(locked)
        return not locked


def tell_loop(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> None:
    """Call `callback` in the loop of another thread, unless that has ended. Not asked first: it may end in between."""
    with suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(callback, *arguments)
