"""What the two halves of a consumer have in common: `Stored`, whose offsets are in Postgres, and `Stateless`.

They live beside each other in one client (docs/decisions/0011-stateless-consumers.md), and share nothing but the
membership in the group: no task, no partition, no wait.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Generic, TypeVar

from aiokafka import AIOKafkaConsumer, TopicPartition

from .fetch_loop import FetchLoop
from .leader_epochs import LeaderEpochs
from .partition import Partition
from .placing import Placer
from .subscription import Subscription

__all__ = ["Half"]

S = TypeVar("S", bound=Subscription[object])
P = TypeVar("P", bound=Partition)
L = TypeVar("L", bound=FetchLoop)


class Half(ABC, Generic[S, P, L]):
    """Consumes the topics of `subscriptions`, with one client after another. partitions: those that are assigned now,
    made by `make`; those of a client that has failed are kept, for the next one's to inherit. of_topic: the same of
    each topic. With a thousand topics each loop would look at thousands of partitions for its few, in each turn."""

    def __init__(self, subscriptions: Mapping[str, S], make: Callable[[TopicPartition], P]) -> None:
        self.subscriptions = subscriptions
        self.partitions: dict[TopicPartition, P] = {}
        self.of_topic: dict[str, dict[TopicPartition, P]] = {topic: {} for topic in subscriptions}
        self.loops: list[L] = []
        self._make = make
        self._placer: Placer | None = None

    @abstractmethod
    def start(self, client: AIOKafkaConsumer, epochs: LeaderEpochs) -> None:
        """Make the parts that work with this client, and start them."""

    def assigned(self, assigned: Collection[TopicPartition]) -> None:
        """These are ours now, and have to be placed; what is in memory of those of before is void."""
        former = dict(self.partitions)
        for some in (self.partitions, *self.of_topic.values()):
            some.clear()
        for tp in assigned:
            if tp.topic in self.subscriptions:
                partition = self.partitions[tp] = self.of_topic[tp.topic][tp] = self._make(tp)
                if (before := former.get(tp)) is not None:
                    partition.inherit(before)
        for partition in former.values():
            partition.displace()

    def place(self) -> None:
        """Some partition has to be placed."""
        if self._placer is not None:
            self._placer.wake()

    def rest(self) -> None:
        """Take up nothing more, and wait for nothing."""

    async def give_up(self) -> None:
        """The partitions may be another's in a moment. Nothing to do where Postgres guards against two owners."""

    @abstractmethod
    async def commit(self) -> None:
        """Tell Kafka what is done."""

    def disconnected(self) -> None:
        """The client is given up."""
        self.loops = []
        for partition in self.partitions.values():
            partition.displace()

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""

    def _wake(self) -> None:
        for loop in self.loops:
            loop.wake()
