"""Which slots this relay has: the slots are spread evenly over the relays that are alive, and leased like origins.

Every second, or third of a shorter lease, each relay says that it is alive, learns how many others are, and from that
how many slots are its share. It acquires free slots up to its share and gives back what is above it; so a slot moves
only when it must. Who is alive is only a matter of balance: the lease decides who sends.
"""

import asyncio
import logging
import os
import random
import socket
from collections.abc import Callable
from datetime import timedelta
from uuid import UUID

import asyncpg

from ... import executor
from ...errors import PostgresUnavailable
from ...executor import Backoff, ExecutorSettings, LeaseThread, Link, now
from ...outage import Outage
from ...schema import load_sql
from ...waiting import set_within
from .backlog import Backlog, Slot
from .metrics import OutboxMetrics

__all__ = ["SLOTS", "SlotKeeper"]

log = logging.getLogger("sidings.outbox")

SLOTS = 16
_NAMES = {number: f"outbox/{number}" for number in range(SLOTS)}
_NUMBERS = {name: number for number, name in _NAMES.items()}
_ATTEND_SECONDS = 1.0  # or a third of a shorter lease
_ALIVE = 5  # heartbeats; a relay that has died counts for so long, and its share is not taken whole before
_CLEAR_SECONDS = 60.0  # from one removal of dead relays' rows to the next: it goes over all versions of all rows


class SlotKeeper:
    """able: whether this relay can send at all; one that cannot reach Kafka leaves the slots to those that can.

    on_acquired, on_retry, on_doubts: there is something new to read; a person wants these topics tried again; of these
    something is in doubt. on_new_server: another server answers than the one that has granted our slots.
    """

    def __init__(
        self,
        link: Link,
        backlog: Backlog,
        leases: LeaseThread,
        metrics: OutboxMetrics,
        lease: ExecutorSettings,
        *,
        schema: str,
        able: Callable[[], bool],
        on_acquired: Callable[[], None],
        on_retry: Callable[[list[str]], None],
        on_doubts: Callable[[list[str]], None],
        on_new_server: Callable[[], None],
    ) -> None:
        self.relay_id: UUID | None = None
        self.stopping = False
        self.busy = False  # with a look, so that its connection is in use
        self.free: list[int] = []  # slots that no relay has
        self.outage = Outage(log, "the slots of the outbox could not be looked at")
        self._link = link
        self._backlog = backlog
        self._leases = leases
        self._metrics = metrics
        self._lease = lease
        self._attend_seconds = min(_ATTEND_SECONDS, lease.lease_seconds / 3)
        self._schema = schema
        self._able = able
        self._on_acquired = on_acquired
        self._on_retry = on_retry
        self._on_doubts = on_doubts
        self._on_new_server = on_new_server
        self._timeline: str | None = None  # of the server that has answered last
        self._first = False  # none that is alive comes before this one: it removes the rows of dead ones
        self._clear_at = 0.0
        self._given_up: dict[str, int] = {}  # let go of in memory, not yet in the database
        self._changed = asyncio.Event()
        self._gone: list[str] = []  # lost, and not told of yet
        self._left = False

    def wake(self) -> None:
        """Look again now."""
        self._changed.set()

    async def run(self) -> None:
        """Keep the right number of slots, for ever."""
        backoff, outage = Backoff(), self.outage
        while not self._left:
            self.busy = True
            try:
                await self._turn()
                backoff.reset()
                outage.over()
            except (PostgresUnavailable, asyncpg.PostgresError) as error:
                outage.failed(error)
                await backoff.sleep()
                continue
            finally:
                self.busy = False
            pause = 0.05 if self._draining() else self._attend_seconds * random.uniform(0.8, 1.2)
            await set_within(self._changed, pause)
            self._changed.clear()

    def lost(self, slot: Slot) -> None:
        """The slot is somebody else's, or its lease has run out: send and record nothing more of it."""
        if not self._backlog.has(slot):
            return
        if not self._gone:  # in an outage all are lost at once
            asyncio.get_running_loop().call_soon(self._tell_of_lost)
        self._gone.append(f"{slot.name} (epoch {slot.epoch})")
        self._leases.drop(slot.name)
        self._backlog.remove_slot(slot)
        self._metrics.slots = len(self._backlog.slots)
        self.wake()

    def _tell_of_lost(self) -> None:
        log.warning("lost %s", ", ".join(self._gone))
        self._gone.clear()

    def _draining(self) -> list[Slot]:
        return [slot for slot in self._backlog.slots.values() if slot.draining]

    async def _turn(self) -> None:
        share, free, due, timeline = await self._attend()
        if self._timeline not in (None, timeline) and self._backlog.directories:
            log.warning(
                "Postgres was replaced (timeline %s): where it lacks commits, topics of directory tables have changes "
                "that the tables do not, so call directory_republish: %s",
                *(timeline, ", ".join(sorted(self._backlog.directories))),
            )
        self._timeline = timeline
        if any(slot.timeline != timeline for slot in self._backlog.slots.values()):
            log.warning("Postgres was replaced (timeline %s): acquiring the slots anew", timeline)
            self._on_new_server()
            return
        if due:
            self._on_retry(due)
        held = sorted((s for s in self._backlog.slots.values() if not s.draining), key=lambda s: s.number)
        for slot in held[share:]:
            self._backlog.forget(slot)
        self._let_go()
        await self._release()
        # What still drains is not taken back: its messages under way have to end first.
        held_names = {slot.name for slot in self._backlog.slots.values()}
        wanted = [name for name in free if name not in held_names]
        random.shuffle(wanted)  # relays that start together should not all ask for the same
        room = share - len([s for s in self._backlog.slots.values() if not s.draining])
        if room > 0 and wanted:
            await self._acquire(sorted(wanted[:room]))

    async def _attend(self) -> tuple[int, list[str], list[str], str]:
        able = self._able() and not self.stopping
        alive_seconds = _ALIVE * self._attend_seconds if able else -1.0
        if clear := self._first and now() >= self._clear_at:
            self._clear_at = now() + _CLEAR_SECONDS  # also if it takes too long: the next heartbeat is without
        row = await self._link.fetchrow(
            load_sql(__package__, "attend", self._schema),
            self.relay_id,
            alive_seconds,
            socket.gethostname(),
            os.getpid(),
            list(_NUMBERS),
            clear,
        )
        assert row is not None
        self._first = row["place"] == 0
        self._backlog.directories = frozenset(row["directories"])
        self.free = [_NUMBERS[name] for name in row["free"]]
        if able and row["doubtful"]:
            self._on_doubts(row["doubtful"])
        relays, place = row["others"] + 1, row["place"]
        share = SLOTS // relays + (place < SLOTS % relays) if able else 0
        return share, row["free"], row["due"], row["timeline"]

    async def _acquire(self, names: list[str]) -> None:
        lease = timedelta(seconds=self._lease.lease_seconds)
        sent = now()
        sql = load_sql(__package__, "acquire", self._schema)
        rows = await self._link.fetch(sql, self.relay_id, names, lease)
        # If this fails they are not ours to send, and are acquired again when the lease has run out.
        inherited = await self._inherited([_NUMBERS[row["acquired"]] for row in rows if row["acquired_epoch"] > 1])
        slots: list[Slot] = []
        for row in rows:
            slot = Slot(_NUMBERS[row["acquired"]], row["acquired"], row["acquired_epoch"], row["timeline"])
            slot.repeated = inherited.get(slot.number, 0)
            slot.deadline = sent + self._lease.lease_seconds - self._lease.margin_seconds
            slots.append(slot)
            self._backlog.add_slot(slot)
        if slots:
            self._leases.hold(slots)
            self._metrics.slots = len(self._backlog.slots)
            log.info("acquired %s", ", ".join(slot.name for slot in slots))
            self._on_acquired()

    async def _inherited(self, numbers: list[int]) -> dict[int, int]:
        """Up to which id messages stand in these slots now: a former owner may have sent them."""
        if not numbers or not self._backlog.directories:
            return {}
        rows = await self._link.fetch(load_sql(__package__, "inherited", self._schema), numbers)
        return {row["slot"]: row["id"] or 0 for row in rows}

    def _let_go(self) -> None:
        for slot in self._draining():
            if slot.under_way <= sum(of is slot for _, of in self._backlog.locked):  # these its next owner sends again
                self._leases.drop(slot.name)
                self._backlog.remove_slot(slot)
                self._given_up[slot.name] = slot.epoch
        self._metrics.slots = len(self._backlog.slots)

    async def _release(self) -> None:
        """Tell the database. What fails is repeated; the epoch keeps a late repetition from releasing too much."""
        if self._given_up:
            given_up = dict(self._given_up)
            sql = load_sql(executor.__name__, "release", self._schema)
            await self._link.fetch(sql, self.relay_id, list(given_up), list(given_up.values()))
            for name in given_up:
                del self._given_up[name]
            log.info("released %s", ", ".join(sorted(given_up)))

    async def leave(self) -> None:
        """The end of a clean stop, after the last slot was let go of: there is no other look."""
        self._left = True
        await self._release()
        await self._link.fetch(load_sql(__package__, "leave", self._schema), self.relay_id)
