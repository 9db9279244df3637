"""One message of a stateless consumer, until it is done with: handled, discarded, or in the dead-letter topic."""

import asyncio
import logging
import sys
import time

from ..errors import KafkaUnavailable, PostgresUnavailable
from ..executor import MOST_CONFLICTS, MOST_CUTS, after_conflict, end_if_forked, forks_so_far
from ..jobs import Again, Discard, Snooze
from ..jobs.retry import CONFLICTS, asked_seconds, that_counts
from ..legible import legible
from ..outage import Outage
from ..waiting import set_within
from .calling import failure_of, text_of, unusual
from .dead_letters import DeadLetters
from .metrics import ConsumerMetrics
from .outbox import InvalidMessage, NotPublished
from .partition import Item
from .patience import DEAF_SECONDS, cancellation
from .stateless_partition import Failing, StatelessPartition
from .stateless_subscription import StatelessSubscription

__all__ = ["StatelessHandling"]

log = logging.getLogger("sidings.consumer")

_DEAD_LETTER_SECONDS = (1.0, 30.0)  # between attempts to get rid of a message: the first pause, and the longest
_AWAY_SECONDS = 1.0  # between attempts of a message whose handler finds a server away


class StatelessHandling:
    """Handles messages of one subscription."""

    def __init__(
        self, subscription: StatelessSubscription[object], dead_letters: DeadLetters, metrics: ConsumerMetrics
    ) -> None:
        self._subscription = subscription
        self._dead_letters = dead_letters
        self._metrics = metrics
        self.outage = Outage(log, f"{subscription.topic}: handlers found Postgres or Kafka away")

    async def settle(self, partition: StatelessPartition, item: Item) -> bool:
        """Try until the message is done with. False: it is not, because the partition is being given up."""
        offset = item.record.offset
        error = item.error
        if item.message is not None:
            result, error = await self._attempts(partition, item)
            if result is not None:
                self._metrics.messages(self._subscription.topic, result)
                partition.failing.pop(offset, None)
                return True
        if error is None or not await self._bury(partition, item, error):
            return False
        partition.failing.pop(offset, None)
        return True

    async def _attempts(self, partition: StatelessPartition, item: Item) -> tuple[str | None, str | None]:
        """(result, None) when the message is done with, (None, error) when it is to be buried, (None, None) when the
        partition is being given up."""
        where = f"{partition.origin} offset {item.record.offset}"
        while True:
            started = time.monotonic()
            try:
                await self._call(partition, item)
                self.outage.over()
                return "handled", None
            except Exception as error:  # noqa: BLE001 - whatever a handler raises, its attempt has failed
                counts, offset = that_counts(error), item.record.offset
                failing = partition.failing.get(offset) or Failing(started)
                cut = isinstance(counts, KafkaUnavailable) and not counts.blameless  # perhaps by what it sends itself
                if isinstance(counts, Discard):
                    log.warning("%s: discarded: %s", where, text_of(error))
                    return "discarded", None
                away = isinstance(counts, PostgresUnavailable | KafkaUnavailable)
                if away and not (cut and failing.cuts >= MOST_CUTS):  # no message is to blame
                    failing.cuts += cut
                    self.outage.failed(text_of(error))
                    if isinstance(counts, KafkaUnavailable):  # of one partition, perhaps, while other messages go on
                        self._metrics.kafka_error()
                    else:
                        self._metrics.postgres_error()
                    partition.failing[offset] = failing
                    delay = _AWAY_SECONDS
                elif partition.leaving.is_set():  # or that is what it makes of its cancellation
                    log.warning("%s: failed while its partition is given up: %s", where, legible(failure_of(error)))
                    return None, None
                elif isinstance(counts, Snooze) and (seconds := asked_seconds(counts)) is not None:
                    delay = seconds
                else:
                    partition.failing[offset] = failing
                    if isinstance(counts, CONFLICTS) and failing.conflicts < MOST_CONFLICTS:
                        failing.conflicts += 1
                        delay = after_conflict(failing.conflicts)
                        log.info("%s: met a conflict, no failure, again in %.1f s: %s", where, delay, text_of(error))
                    else:
                        delay, told = self._failed(failing, error, started, where)
                        if delay is None:
                            return None, told
            if await set_within(partition.leaving, delay):
                return None, None

    def _failed(self, failing: Failing, error: Exception, started: float, where: str) -> tuple[float | None, str]:
        """The seconds until the next attempt, None where there is none, and what has failed."""
        topic, told = self._subscription.topic, failure_of(error)
        self._metrics.failed(topic)
        if not failing.failures:  # an outage before it is none
            failing.since = started
        outcome = self._subscription.outcome_of(error, failing.failures, time.monotonic() - failing.since)
        failing.failures, failing.conflicts = failing.failures + 1, 0
        if not isinstance(outcome, Again):
            log.error("%s: given up after %s attempts: %s", where, failing.failures, legible(told))
            return None, told
        self._metrics.retried(topic)
        delay = outcome.delay
        log.warning("%s: attempt %s failed, again in %.1f s: %s", where, failing.failures, delay, legible(told))
        return delay, told

    async def _call(self, partition: StatelessPartition, item: Item) -> None:
        """One call of the handler."""
        assert item.message is not None
        started, timeout, offset = time.monotonic(), self._subscription.timeout, item.record.offset
        loop = asyncio.get_running_loop()
        deaf = None if timeout is None else loop.call_later(timeout + DEAF_SECONDS, partition.deaf.add, offset)
        forks, task = forks_so_far(), asyncio.current_task()
        partition.calls[offset] = started
        try:
            async with asyncio.timeout(timeout):
                try:
                    await self._subscription.run(item.message)
                finally:
                    if task is not None and task.cancelling():
                        await cancellation(task)
        except asyncio.CancelledError as error:
            if partition.leaving.is_set():
                raise
            raise RuntimeError("the handler raised CancelledError") from error
        except Exception:
            raise
        except BaseException as error:
            end_if_forked(forks, error)
            raise unusual(error, task) from error
        finally:
            if deaf is not None:
                deaf.cancel()
            partition.calls.pop(offset, None)
            partition.deaf.discard(offset)
            end_if_forked(forks, sys.exception())
            self._metrics.handled(self._subscription.topic, time.monotonic() - started)

    async def _bury(self, partition: StatelessPartition, item: Item, error: str) -> bool:
        """Put the message into the dead-letter topic; only its acknowledgement lets the offset pass. False: it is not
        there, because the partition is being given up."""
        topic = self._subscription.dead_letter
        pause, longest = _DEAD_LETTER_SECONDS
        partition.failing.setdefault(item.record.offset, Failing(time.monotonic()))
        while True:
            try:
                await self._dead_letters.send(topic, item.record, error)
            except (InvalidMessage, NotPublished, KafkaUnavailable) as refused:
                partition.stuck = f"offset {item.record.offset} cannot go to the dead-letter topic {topic!r}: {refused}"
                log.error("%s stands still: %s", partition.origin, partition.stuck)
            else:
                partition.stuck = None
                log.error("%s offset %s is in %r: %s", partition.origin, item.record.offset, topic, legible(error))
                self._metrics.messages(self._subscription.topic, "dead_letter")
                return True
            if await set_within(partition.leaving, pause):
                return False
            pause = min(2 * pause, longest)
