"""The relay: composes reader, lanes, recorder and slots, and starts and stops them together."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

import asyncpg
from prometheus_client import REGISTRY, CollectorRegistry

from ...errors import PostgresUnavailable
from ...executor import (
    Backoff,
    ExecutorSettings,
    LeaseEvents,
    LeaseThread,
    Link,
    PostgresSettings,
    check_schema,
    close_all,
    now,
)
from ...outage import Outage
from ..settings import KafkaSettings
from .amends import Amends
from .backlog import Backlog, Lane, Slot, slot_of
from .failures import Failed
from .figures import Figures
from .lane_senders import LaneSenders
from .lanes import LaneWorker
from .metrics import OutboxMetrics
from .packing import Packer
from .reader import Reader
from .recorder import Recorder
from .rounds import Rounds
from .senders import Senders
from .settings import OutboxSettings
from .slots import SLOTS, SlotKeeper

__all__ = ["Relay"]

log = logging.getLogger("sidings.outbox")

_UNREACHABLE_SECONDS = 15.0  # without Kafka, before the health check complains
_HELD_UP_SECONDS = 15.0  # the same of what Postgres refuses, or somebody's transaction keeps locked
_STALL_SECONDS = 30.0  # an event loop that has not answered for so long keeps no slots


class Relay:
    """Sends what waits in the outbox, in order per key, at least once. Any number may run, in any processes.

    `start` returns at once, also while Postgres or Kafka is away; `stop` sends what waits, for `shutdown_seconds` at
    most, and gives the slots back.
    """

    def __init__(
        self,
        service: str,
        postgres: PostgresSettings,
        kafka: KafkaSettings,
        settings: OutboxSettings | None = None,
        *,
        prometheus: CollectorRegistry = REGISTRY,
    ) -> None:
        self.id = uuid4()  # until it starts
        self.settings = settings or OutboxSettings()
        self.metrics = OutboxMetrics(service, prometheus)
        self.backlog = Backlog(self.settings.window)
        self._service = service
        self._postgres = postgres
        schema = postgres.schema_name
        self._links = {name: Link(postgres) for name in ("read", "record", "park", "slots", "figures", "amends")}
        self._amends = Amends(self._links["amends"], schema=schema)
        self._senders = Senders(kafka, self.settings)
        self._packer = Packer(
            service, kafka.partitioners, most=self.settings.batch_size, max_bytes=self.settings.max_message_bytes
        )
        self.reader = Reader(
            self._links["read"],
            self.backlog,
            schema=schema,
            poll_seconds=self.settings.poll_seconds,
            on_rows=self._rows,
            on_new_server=self._new_server,
        )
        self._recorder = Recorder(
            self._links["record"],
            self._links["park"],
            self.backlog,
            self.metrics,
            schema=schema,
            on_fenced=self._fenced,
            on_room=self._room,
        )
        lease = ExecutorSettings(lease_seconds=self.settings.lease_seconds)
        events = LeaseEvents(self._lease_lost, wanted=lambda _name, _generation: None, replaced=self._new_server)
        self._leases = LeaseThread(postgres, lease, events, lambda: None, self._stalled)
        self._slots = SlotKeeper(
            self._links["slots"],
            self.backlog,
            self._leases,
            self.metrics,
            lease,
            schema=schema,
            able=lambda: self._senders.connected,
            on_acquired=self.reader.wake,
            on_retry=self._retry,
            on_doubts=self._amends.due,
            on_new_server=self._new_server,
        )
        self._workers: dict[Lane, LaneWorker] = {}
        self._group: asyncio.TaskGroup | None = None
        self._main: asyncio.Task[None] | None = None
        self._stopped = self._ending = False
        self._answered = now()  # by the event loop

    def wake(self) -> None:
        """Messages were committed: look for them now instead of at the next poll."""
        self.reader.wake()

    @property
    def held(self) -> dict[str, int]:
        """The slots that this relay sends for, with their epochs."""
        return {slot.name: slot.epoch for slot in self.backlog.slots.values() if not slot.draining}

    def problems(self) -> list[str]:
        """What a health check should complain about; empty when all is well."""
        found: list[str] = []
        if self._main is None or self._main.done():
            found.append("the relay does not run")
        unread = now() - self.reader.last_answer  # where nothing wakes it, it reads at the next poll
        if unread > max(5.0, self.settings.lease_seconds) + 1.2 * self.settings.poll_seconds:
            error = self.reader.outage.error
            found.append(f"the outbox was last read {unread:.1f} s ago" + (f": {error}" if error is not None else ""))
        return found

    def held_up(self) -> list[str]:
        """The same of what makes messages wait while publishing goes on: above all that Kafka is away."""
        found: list[str] = []
        if self._senders.outage.seconds() >= _UNREACHABLE_SECONDS:
            found.append(f"the relay cannot send to Kafka: {self._senders.outage.error}")
        for what, outage in (
            ("the slots of the outbox cannot be looked at", self._slots.outage),
            ("what Kafka has cannot be deleted from the outbox", self._recorder.outage),
        ):
            if (failing := outage.seconds()) >= _HELD_UP_SECONDS:
                found.append(f"{what}, for {failing:.1f} s: {outage.error}")
        leases = self._leases.outage
        recent = time.monotonic() - max(_HELD_UP_SECONDS, self.settings.lease_seconds)  # without slots none is renewed
        if (failing := leases.seconds()) >= _HELD_UP_SECONDS and (leases.failed_at or 0.0) >= recent:
            found.append(f"the leases of the outbox's slots cannot be renewed, for {failing:.1f} s: {leases.error}")
        if (locked := self._recorder.locked_seconds()) >= _HELD_UP_SECONDS:
            found.append(f"somebody's transaction keeps messages locked that Kafka has, for {locked:.1f} s")
        return found

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start in the background. Postgres and Kafka may be away: the relay waits for them. Where the schema does not
        fit, `wait` raises `SchemaError`."""
        self.id = uuid4()  # only now: what was made before a fork runs in several processes
        self._leases.executor_id = self._recorder.relay_id = self._slots.relay_id = self.id
        self._main = asyncio.create_task(self._run(), name="sidings relay")

    async def wait(self) -> None:
        """Return when the relay has been stopped; raise what ended it otherwise."""
        if self._main is not None:
            await asyncio.wait([self._main])
            if not self._main.cancelled():
                self._main.result()

    async def drain(self, timeout: float) -> bool:
        """Send what waits now in the slots of this relay. False: something still waited after `timeout` seconds, or
        belongs to a topic that fails; or waits in the outbox, where this relay has no slots."""
        try:
            async with asyncio.timeout(timeout):
                while self.backlog.slots:
                    before = self.reader.last_answer
                    self.reader.wake()
                    while self.reader.last_answer <= before or any(
                        (lane.queue or lane.unaccounted) and not lane.paused for lane in self.backlog.all_lanes()
                    ):
                        await asyncio.sleep(0.005)
                    if not self.reader.hungry():
                        failing = [lane.topic for lane in self.backlog.all_lanes() if lane.paused]
                        return not failing or not await self._waits(list(self.backlog.slots), failing)
                return not await self._waits(list(range(SLOTS)), None)
        except (TimeoutError, PostgresUnavailable, asyncpg.PostgresError):
            return False

    async def _waits(self, slots: list[int], topics: list[str] | None) -> bool:
        """Whether messages for these (None: for any) wait there. Of topics that fail only the database knows: all may
        be parked by now."""
        return (await self._recorder.call("waits", slots, topics))[0]["waits"]

    async def stop(self) -> None:
        """Send what waits, then give the slots back, all within `shutdown_seconds`. Safe to call twice, and when never
        started."""
        if self._stopped:
            return
        self._stopped = True
        try:
            if self._group is not None:  # else it has not begun, and has nothing to give back
                await self._wind_down()
        finally:
            async with AsyncExitStack() as ends:  # the last first; each, also where this is cancelled again and again
                ends.callback(self.metrics.close)
                ends.push_async_callback(close_all, self._links.values())
                ends.push_async_callback(self._senders.close)
                ends.push_async_callback(self._leases.stop)
                if self._main is not None:
                    self._main.cancel()
                    await asyncio.gather(self._main, return_exceptions=True)

    async def _wind_down(self) -> None:
        deadline = now() + self.settings.shutdown_seconds
        if self._senders.connected and not await self.drain(self.settings.shutdown_seconds / 2):  # 1. send what waits
            log.warning("stopping: messages still wait in the outbox; another relay will send them")
        while self._amends.owed and now() < deadline:
            await asyncio.sleep(0.01)
        self._slots.stopping = True  # 2. release the slots
        self._slots.wake()
        while self.backlog.slots and now() < deadline:
            await asyncio.sleep(0.01)
        try:
            async with asyncio.timeout(max(0.2, deadline - now())):
                while self._slots.busy:
                    await asyncio.sleep(0.005)
                await self._slots.leave()  # 3. count no more
        except (TimeoutError, PostgresUnavailable, asyncpg.PostgresError) as error:
            left = ", ".join(slot.name for slot in self.backlog.slots.values())
            log.warning("stopped without releasing %s; the leases run out by themselves (%r)", left or "all", error)

    async def _run(self) -> None:
        backoff, outage = Backoff(), Outage(log, "the relay could not start")
        while True:
            try:
                await check_schema(self._postgres, self._service)
                outage.over()
                break
            except PostgresUnavailable as error:
                outage.failed(error)
                await backoff.sleep()
        self._leases.start()
        figures = Figures(
            self._links["figures"],
            self.metrics,
            schema=self._postgres.schema_name,
            seconds=self.settings.figures_seconds,
            slots=lambda: self.backlog.slots,
            free=lambda: self._slots.free,
        )
        loops: list[Coroutine[Any, Any, None]] = [
            self._senders.run(),
            self.reader.run(),
            self._recorder.run(),
            self._slots.run(),
            self._amends.run(),
            self._watch_leases(),
            self._watch_kafka(),
            figures.run(),
        ]
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for loop in loops:
                    group.create_task(self._watched(loop), name=f"sidings {loop.__qualname__}")
        except BaseException:
            self._leases.suspended = True  # without its loops this process must not keep its slots
            raise
        finally:
            self._group = None

    async def _watched(self, work: Coroutine[Any, Any, None]) -> None:
        """One that somebody else has cancelled would be missed by nobody: a task group goes on without it."""
        assert self._main is not None
        try:
            await work
        except asyncio.CancelledError as error:
            if self._ending or self._main.cancelling():
                raise
            self._ending = True
            raise RuntimeError(f"{work.__qualname__} was cancelled from outside") from error
        except BaseException:
            self._ending = True
            raise

    # -- between the parts ------------------------------------------------------------------------------------------

    def _rows(self) -> None:
        for lane in self.backlog.all_lanes():
            if lane.queue or lane.owns:
                if lane not in self._workers:
                    self._begin(lane)
                lane.event.set()

    def _begin(self, lane: Lane, failed: Failed | None = None) -> None:
        if self._group is not None:
            worker = self._workers[lane] = self._make_worker(lane, failed)
            self._group.create_task(self._watched(worker.run()), name=f"sidings outbox {lane.name}")

    def _end(self, lane: Lane) -> None:
        del self._workers[lane]
        if lane.owns:
            self.backlog.join(lane)
        else:
            del self.backlog.lanes[lane.topic]  # the next message for it makes another
            self.metrics.forget(lane.topic)

    def _make_worker(self, lane: Lane, failed: Failed | None) -> LaneWorker:
        rounds = Rounds(
            lane,
            self.backlog,
            LaneSenders(self._senders),
            self._recorder,
            self._packer,
            self.metrics,
            self.settings,
            self._room,
        )
        return LaneWorker(
            rounds, self._recorder, self.metrics, self.settings, self._room, self._begin, self._end, failed
        )

    def _room(self) -> None:
        if self.reader.hungry():
            self.reader.wake()

    def _retry(self, topics: list[str]) -> None:
        for topic in topics:
            workers = [self._workers[lane] for lane in self.backlog.of_topic(topic) if lane in self._workers]
            if len(workers) > 1 and any(worker.trying for worker in workers):
                continue  # the time was that of one of them
            for worker in workers:
                worker.due()

    def _new_server(self) -> None:
        self._leave_server()
        for slot in list(self.backlog.slots.values()):
            self._lose(slot)

    def _lease_lost(self, epochs: Mapping[str, int]) -> None:
        for slot in list(self.backlog.slots.values()):
            if epochs.get(slot.name) == slot.epoch:
                self._lose(slot)

    def _leave_server(self) -> None:
        """Some of our connections may lead to a former primary, which lives on: all go where a new one leads."""
        for link in self._links.values():
            link.renew()

    def _fenced(self, slot: Slot) -> None:
        if self.backlog.has(slot):  # else it was let go of meanwhile, with what was locked
            self._leave_server()
            self._lose(slot)

    def _lose(self, slot: Slot) -> None:
        under_way = slot.under_way
        self._slots.lost(slot)
        if under_way:
            for worker in self._workers.values():
                self._amends.owe(worker.lane.topic, (row for row in worker.outstanding() if slot_of(row) is slot))
            # Its new owner sends these; a repeat by aiokafka might come after what he sends then.
            log.warning("%s was lost with %s messages under way: closing the producers", slot.name, under_way)
            self._senders.kill_all()
            for worker in self._workers.values():
                worker.cut()

    def _stalled(self) -> bool:
        return now() - self._answered > _STALL_SECONDS

    # -- loops ------------------------------------------------------------------------------------------------------

    async def _watch_leases(self) -> None:
        """The first thing that runs in a process which was stopped for longer than its leases."""
        while True:
            slots = list(self.backlog.slots.values())
            self._answered = time = now()
            for slot in slots:
                if slot.expired(time):
                    self._lose(slot)
            until = min((slot.deadline for slot in self.backlog.slots.values()), default=time + 1.0)
            await asyncio.sleep(min(1.0, max(0.01, until - time)))

    async def _watch_kafka(self) -> None:
        """After an interruption, what failed because of it goes at once, and the slots are ours again."""
        seen = 0
        while True:
            await self._senders.main()
            if self._senders.connections != seen:
                seen = self._senders.connections
                self._slots.wake()
                for worker in list(self._workers.values()):
                    worker.reconnected()
            await asyncio.sleep(0.05)
