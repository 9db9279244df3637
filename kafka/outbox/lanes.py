"""Sends the messages of each topic, in order, and each topic for itself: round after round, with a pause after a
failure."""

import logging
import random
from collections.abc import Callable

import asyncpg
from aiokafka.errors import InvalidTopicError

from ...errors import PostgresUnavailable
from ...executor import now
from ...legible import told
from ...waiting import set_within
from .backlog import Lane, Row
from .failures import NO_TOPIC, Failed, text_of
from .metrics import OutboxMetrics
from .recorder import Recorder, clean
from .rounds import Rounds
from .settings import OutboxSettings

__all__ = ["LaneWorker"]

log = logging.getLogger("sidings.outbox")

_FORGET_SECONDS = 3_600.0  # without a message for a topic, before its lane ends: each read walks through all of them


class LaneWorker:
    """Sends one lane's messages until there have been none for long; those of a part until it is empty. on_room: the
    lane wants messages back from the database. on_split: a part has gone apart, as it failed. on_end: the lane has
    ended. failed: why it went apart."""

    def __init__(
        self,
        rounds: Rounds,
        recorder: Recorder,
        metrics: OutboxMetrics,
        settings: OutboxSettings,
        on_room: Callable[[], None],
        on_split: Callable[[Lane, Failed], None],
        on_end: Callable[[Lane], None],
        failed: Failed | None = None,
    ) -> None:
        self.lane = rounds.lane
        self.retries = 0
        self.retry_at = 0.0
        self._unreachable = False
        self._missing_since: float | None = None  # Kafka says so; what was before, as an outage, does not count
        self._rounds = rounds
        self._recorder = recorder
        self._metrics = metrics
        self._settings = settings
        self._on_room = on_room
        self._on_split = on_split
        self._on_end = on_end
        self._failed = failed

    @property
    def trying(self) -> bool:
        """Whether what has failed is tried again at this moment: not where all that failed has gone apart, nor of a
        part that has nothing left, and only waits for the topic's next read."""
        lane = self.lane
        under_way = lane.unaccounted - self._recorder.locked_of(lane)
        waits = lane.queue or (lane.behind and not lane.closing)
        return self.retries > 0 and bool(under_way or (not lane.paused and waits))

    def outstanding(self) -> list[Row]:
        """The messages under way of which nothing has become yet."""
        return self._rounds.ledger.outstanding()

    def cut(self) -> None:
        """As `Senders.kill_all`, of the producer that a topic which fails has for itself."""
        self._rounds.cut()

    def retry_now(self) -> None:
        """Not when the backoff ends."""
        self.retry_at = 0.0
        self.lane.event.set()

    def due(self) -> None:
        """The database says that the topic fails, and that its time has come: a person wants it, or it is over."""
        self.lane.failing = True
        self.retry_now()

    def reconnected(self) -> None:
        """Kafka has come back: what failed because it was away is tried at once."""
        if self._unreachable:
            self.retry_now()

    async def run(self) -> None:
        """Take, send, record, until the lane ends; back off after a failure."""
        try:
            if self._failed is not None:
                await self._back_off(self._failed)
            while await self._ready():
                try:
                    await self._rounds.send_next(self.retries)
                except Failed as failed:
                    await self._fail(failed)
                else:
                    await self._succeeded()
        finally:
            await self._rounds.close()

    async def _ready(self) -> bool:
        """Wait until there is something to send and the topic does not back off. False: the lane has ended."""
        lane, idle = self.lane, False
        while True:
            lane.event.clear()
            pause = self.retry_at - now()
            if self._recorder.locked_of(lane) >= self._settings.window:  # the topic waits, and not all others with it
                if not lane.paused:
                    lane.paused = True
                    lane.shelve()
                    self._on_room()
                await lane.event.wait()
                continue
            if pause <= 0 and lane.paused:
                lane.paused = False
                self._on_room()
            if pause <= 0 and lane.queue:
                return True
            if pause <= 0 and self._is_over(idle=idle):
                await self._rounds.quiet()
                if self._is_over(idle=idle):
                    self._on_end(lane)
                    return False
            if pause <= 0 and lane.failing and not (lane.behind or lane.unaccounted):
                self._rounds.cut()  # with nothing under way: there may never be a next message, which would end it
                await self._works()  # nothing waits for it that could show whether it does
            idle = not await set_within(lane.event, pause if pause > 0 else _FORGET_SECONDS) and pause <= 0

    def _is_over(self, *, idle: bool) -> bool:
        lane = self.lane
        return lane.empty and bool(lane.owns or (idle and not (lane.failing or self._rounds.apart())))

    async def _fail(self, failed: Failed) -> None:
        """Give back what was not acknowledged, and back off."""
        lane = self.lane
        lane.paused = not failed.cut
        if failed.stuck:
            await self._rounds.quiet()  # the next messages of these go through other producers
        outstanding = self._rounds.forget()
        # Else a refill would bring what is about to be deleted.
        while lane.unaccounted - self._recorder.locked_of(lane) > len(outstanding):
            lane.event.clear()
            await lane.event.wait()
        lane.give_back(outstanding)
        if failed.cut:
            log.info("%s: the producer was closed, sending again: %s", lane.name, failed)
        elif failed.stuck:
            self._on_split(self._rounds.split(failed.stuck), failed)
            lane.paused = False
            if failed.progress:
                self.retries = 0
                self._unreachable, self._missing_since = False, None
        else:
            await self._back_off(failed)
        self._on_room()

    async def _back_off(self, failed: Failed) -> None:
        topic, error, settings = self.lane.topic, text_of(failed.error), self._settings
        self.retries += 1
        self._unreachable = failed.unreachable
        self._missing_since = (self._missing_since or now()) if isinstance(failed.error, NO_TOPIC) else None
        longest = min(settings.max_backoff_seconds, settings.backoff_seconds * 2 ** min(self.retries - 1, 30))
        pause = longest * random.uniform(0.75, 1.0)
        self.retry_at = now() + pause
        log.warning("%s fails (%s in a row), next try in %.1f s: %s", self.lane.name, self.retries, pause, error)
        self._metrics.failed(topic)
        self._metrics.failing.add(topic)
        self.lane.failing = True
        await self._tell("topic_fails", topic, self._recorder.relay_id, self.retries, pause, clean(error))
        patience = settings.topic_patience_seconds
        if self.lane.owns and self._rounds.others_work():
            return  # the topic is there
        if isinstance(failed.error, InvalidTopicError) or (
            self._missing_since and patience is not None and now() - self._missing_since >= patience
        ):
            await self._park_all(error)

    async def _park_all(self, error: str) -> None:
        try:
            count = await self._recorder.park_topic(self.lane.topic, error)
        except (PostgresUnavailable, asyncpg.PostgresError) as failure:
            log.warning("messages for %s could not be parked, trying again: %s", self.lane.topic, told(failure))
        else:
            log.error("%s: no message can be sent; %s messages are parked: %s", self.lane.topic, count, error)

    async def _succeeded(self) -> None:
        if not self._rounds.ledger.accepted:
            return
        if self.retries:
            log.warning("%s works again", self.lane.name)
        self.retries = 0
        self._unreachable, self._missing_since = False, None
        if self.lane.failing:
            await self._works()

    async def _works(self) -> None:
        if self.lane.owns or self._rounds.apart():
            return  # told when all are together again
        self._metrics.failing.discard(self.lane.topic)
        self.lane.failing = not await self._tell("topic_works", self.lane.topic, self._recorder.relay_id)

    async def _tell(self, query: str, *args: object) -> bool:
        """Whether it is stored."""
        try:
            await self._recorder.call(query, *args)
        except (PostgresUnavailable, asyncpg.PostgresError) as error:
            log.warning("the state of %s could not be stored: %s", self.lane.topic, told(error))
            return False
        return True
