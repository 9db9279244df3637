"""The declaration of a stateless consumer."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from ..errors import ConfigurationError
from ..jobs import Retry
from ..jobs.middleware import Call, call_through
from .calling import working_on
from .checks import check_count
from .message import Message, check_topic
from .subscription import Decoder, Start, Subscription

__all__ = ["StatelessSubscription"]

T = TypeVar("T")


class StatelessSubscription(Subscription[T]):
    """A topic whose handler takes the message alone, made by ``Service.consumer(..., stateless=True)``; see there."""

    arguments = 1
    form = "`async def on_x(message: Message[X]) -> None`: with stateless=True there is no transaction"
    exhausted = "with stateless=True: leave it out, and a message that is given up goes to the topic dead_letter"
    followed = "and a message that is given up goes to the topic dead_letter"

    def __init__(
        self,
        topic: str,
        handler: Callable[[Message[T]], Awaitable[object]],
        *,
        concurrency: int,
        dead_letter: str | None,
        model: Any,
        decoder: Decoder | None,
        retry: Retry | None,
        start: Start,
        timeout: float | None,
    ) -> None:
        if dead_letter:
            check_topic(dead_letter, "dead_letter")
        if concurrency is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise ConfigurationError(f"{topic}: concurrency=None: give a positive number of messages")
        check_count(concurrency, "concurrency", topic, "a positive number of messages")
        if not dead_letter or dead_letter == topic:
            raise ConfigurationError(
                f"{topic}: dead_letter={dead_letter!r}: name another topic, such as {topic + '.dlq'!r}, for messages "
                "that cannot be decoded or that fail until their retry policy gives up"
            )
        super().__init__(topic, handler, model=model, decoder=decoder, retry=retry, start=start, timeout=timeout)
        self.concurrency = concurrency
        self.dead_letter = dead_letter

    async def run(self, message: Message[T]) -> None:
        """Run the handler, inside of the service's middleware."""
        call = Call(self.topic, message.origin, messages=[message])
        with working_on(message):
            await call_through(self.middleware, call, partial(self.handler, message))
