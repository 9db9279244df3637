"""Which producer the messages of a topic go through."""

import asyncio
from math import inf

from aiokafka.errors import ProducerClosed

from ...errors import KafkaUnavailable
from ...executor import now
from .failures import Failed
from .senders import Sender, Senders

__all__ = ["LaneSenders"]

_CAREFUL_SECONDS = 60.0  # after a refusal the topic keeps a producer of its own for so long
_GRACE_SECONDS = 1.0  # for the batches of other topics, before a producer whose batch has no answer is killed


class LaneSenders:
    """The shared producer; one of its own for a topic that fails, or has had a message refused."""

    def __init__(self, senders: Senders) -> None:
        self._senders = senders
        self._own: Sender | None = None
        self._careful_until = -inf
        self._kills: set[asyncio.Task[None]] = set()

    async def choose(self, *, failing: bool) -> Sender:
        """The producer for the next round. failing: so has the last. Raises `Failed`."""
        await self.quiet()
        main = await self._senders.main()
        if failing or now() <= self._careful_until:
            return await self.own()
        if self._own is not None:
            self._senders.retire(self._own)  # in the background: a stop may cancel this
            self._own = None
        return main

    async def quiet(self) -> None:
        """Wait until what was killed is dead: its batch must not arrive after the repeat of it."""
        if self._kills:
            await asyncio.wait(self._kills)

    async def own(self) -> Sender:
        """The producer of this topic alone. Raises `Failed`."""
        if self._own is None:
            sender = self._senders.alone()
            try:
                await sender.start()
            except KafkaUnavailable as error:
                self._senders.unreachable()
                raise Failed(error, unreachable=True) from error
            self._own = sender
        return self._own

    def released(self, sender: Sender) -> None:
        """A round has ended."""
        self._senders.released(sender)

    def refused(self, sender: Sender) -> None:
        """Kafka has refused a batch: no idempotent producer can go on after that."""
        self._careful_until = now() + _CAREFUL_SECONDS
        if sender.idempotent:
            self._senders.retire(sender)

    def failure(self, sender: Sender, error: BaseException, *, unreachable: bool = False) -> Failed:
        """What to raise. The producer is not used again after it, by us or by others."""
        cut = isinstance(error, ProducerClosed) or sender.closed
        if sender is self._own:
            self._own = None
            self._kill(sender, 0.0)
        elif unreachable:
            self._kill(sender, _GRACE_SECONDS)
        elif not cut:
            self._senders.retire(sender)
        return Failed(error, cut=cut, unreachable=unreachable)

    def end(self) -> None:
        """What the topic's own producer has under way may not be sent again; there is another one after it."""
        if self._own is not None:
            own, self._own = self._own, None
            self._kill(own, 0.0)

    async def close(self) -> None:
        """The topic is sent no more: end its own producer."""
        if self._own is not None:
            await self._own.kill()

    def _kill(self, sender: Sender, grace: float) -> None:
        task = asyncio.create_task(self._senders.kill(sender, grace))
        self._kills.add(task)
        task.add_done_callback(self._kills.discard)
