"""From Kafka's assignment to the executor's origins.

Kafka's assignment is routing, the lease decides (docs/architecture.md): so nothing is drained because of an eager
rebalance, in which every member loses everything for a moment. Only the new assignment says what is to be given up.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition

from ..errors import ConfigurationError
from ..executor import Executor
from ..jobs.enqueue import possible_origin
from .message import check_topic, origin_of

__all__ = ["Assign", "KafkaExecutor", "RebalanceListener", "StaticAssignment"]

log = logging.getLogger("sidings.assignment")

Assign = Callable[[Collection[str], int], None]

_SLOT = re.compile(r"outbox/(\d|1[0-5])")


@dataclass(frozen=True)
class StaticAssignment:
    """Origins for a service without Kafka: ``StaticAssignment(["orders/0", "orders/1"])``.

    Several instances may be given the same origins: one has the lease, the others take over when it is gone.

    Args:
        origins: At least one, each once, as ``topic/partition``; not ``outbox/0`` to ``outbox/15``, which are the slots
            of the outbox.

    Raises:
        ConfigurationError: `origins` break these rules.
    """

    origins: tuple[str, ...]

    def __init__(self, origins: Iterable[str]) -> None:
        if isinstance(origins, str):
            raise ConfigurationError(f"StaticAssignment({origins!r}): give a list of origins: [{origins!r}]")
        names = tuple(origins) if isinstance(origins, Iterable) else ()  # pyright: ignore[reportUnnecessaryIsInstance]
        texts = all(isinstance(name, str) and name for name in names)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not names or not texts or len(set(names)) != len(names):
            raise ConfigurationError(f"StaticAssignment({list(names)!r}): give at least one origin, each once")
        if wrong := [name for name in names if not possible_origin(name)]:
            raise ConfigurationError(f"StaticAssignment({wrong!r}): give 'topic/partition', such as 'orders/0'")
        if reserved := [name for name in names if _SLOT.fullmatch(name)]:
            raise ConfigurationError(
                f"StaticAssignment({reserved!r}): outbox/0 to outbox/15 are the slots of the outbox: choose another"
            )
        object.__setattr__(self, "origins", names)


class _Coordinator(Protocol):
    """What is read of aiokafka's private GroupCoordinator."""

    generation: int
    _enable_auto_commit: bool


class RebalanceListener(ConsumerRebalanceListener):
    """Turns the assignments of a consumer group into those of an executor.

    For a consumer of your own: ``consumer.subscribe(topics, listener=service.executor.rebalance_listener)``, or call
    its two methods from a listener of yours, within aiokafka's own callback. The consumer must not commit by itself
    (``enable_auto_commit=False``): it would commit messages whose jobs are not stored yet. Nor may a topic have the
    name that the outbox' slots have, ``outbox``. The service must not join topics itself, for consumers, ``topics=`` or
    a ``home``: the two groups would take the origins from each other.

    Args:
        patience_seconds: After partitions were revoked, how long to wait for the next assignment before the jobs are
            drained. A rebalance that takes longer is none that this process takes part in.
    """

    def __init__(self, assign: Assign, *, patience_seconds: float = 60.0) -> None:
        self._assign = assign
        self._patience_seconds = patience_seconds
        # Gets the error where the consumer breaks these rules. None: it is raised.
        self.on_refused: Callable[[Exception], None] | None = None
        self._consumer: AIOKafkaConsumer | None = None  # the service's own, which has joined `_topics`
        self._topics: Collection[str] = ()
        self._has_called = False  # a consumer of the user's
        self._timer: asyncio.TimerHandle | None = None
        self._generation = 0
        self._closed = False

    def follow(self, consumer: AIOKafkaConsumer, topics: Collection[str]) -> None:
        """The service itself joins `topics` with this consumer, which calls `take`, and has the generation. Nobody else
        may assign. Raises as `on_partitions_assigned`."""
        self._consumer, self._topics = consumer, topics
        try:
            self._check_alone()
        except ConfigurationError as error:
            self._refuse(error)

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        """A rebalance begins. Jobs go on under their leases."""
        if revoked and not self._closed:
            self._start_timer()

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        """A rebalance has ended with the complete assignment of this member.

        Raises:
            ConfigurationError: The consumer commits by itself, a topic has the name of the outbox' slots, or the
                service joins topics itself; unless `on_refused` takes it.
        """
        self._has_called = True
        self.take(assigned)

    def take(self, assigned: Collection[TopicPartition]) -> None:
        """The same, for the service's own consumer."""
        if self._closed:
            return
        self._stop_timer()
        try:
            self._check_alone()
            for topic in {tp.topic for tp in assigned}:
                check_topic(topic, "rebalance_listener", leased=True)
            self._generation = self._find_generation()
        except ConfigurationError as error:
            self._refuse(error)
            return
        self._assign([origin_of(tp.topic, tp.partition) for tp in assigned], self._generation)

    def close(self) -> None:
        """From now on nothing is passed on: the executor is stopping and gives its origins back itself."""
        self._closed = True
        self._stop_timer()

    def _refuse(self, error: ConfigurationError) -> None:
        log.critical("%s", error)
        if self.on_refused is None:
            raise error
        self.on_refused(error)

    def _check_alone(self) -> None:
        if self._has_called and self._consumer is not None:
            raise ConfigurationError(
                "a consumer of your own has executor.rebalance_listener, and the service itself joins "
                f"{', '.join(self._topics)}, for its consumers, topics= or a home: leave these out, or the listener"
            )

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(self._patience_seconds, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        log.error("no assignment came for %s s after a revocation: draining all jobs", self._patience_seconds)
        self._assign((), self._generation)

    def _find_generation(self) -> int:
        """The generation of the consumer group: it grows with every rebalance and is the same for all members, so
        that of two believers the newer one is right."""
        coordinator = self._coordinator()
        if coordinator is None:
            log.warning("the generation of the consumer group cannot be seen from here: the clock stands in for it")
            return max(self._generation + 1, round(time.time() * 1000))
        if coordinator._enable_auto_commit:  # pyright: ignore[reportPrivateUsage]
            raise ConfigurationError(
                "the consumer commits offsets by itself (enable_auto_commit=True), which would commit messages whose "
                "jobs are not stored yet: make it with enable_auto_commit=False, and commit after the transaction"
            )
        return coordinator.generation

    def _coordinator(self) -> _Coordinator | None:
        # aiokafka (0.12 to 0.14) shows the generation nowhere in public. A consumer of ours is known; that of a user
        # is found through the task that runs this callback, which is its coordinator's.
        if self._consumer is not None:
            return cast(_Coordinator | None, self._consumer._coordinator)  # pyright: ignore[reportPrivateUsage]
        task = asyncio.current_task()
        frame: Any = getattr(task.get_coro(), "cr_frame", None) if task is not None else None
        candidate = frame.f_locals.get("self") if frame is not None else None
        if isinstance(getattr(candidate, "generation", None), int) and hasattr(candidate, "_enable_auto_commit"):
            return cast(_Coordinator, candidate)
        return None


class KafkaExecutor(Executor):
    """An executor that a consumer group can assign origins to."""

    @cached_property
    def rebalance_listener(self) -> RebalanceListener:
        """For a consumer of your own: ``consumer.subscribe(topics, listener=service.executor.rebalance_listener)``."""
        return RebalanceListener(self.assign)
