"""A topic with messages of several types, each with a model and a handler of its own."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeVar, cast

from pydantic_core import from_json

from ..errors import ConfigurationError, UndecodableMessage, UnknownMessageType
from ..jobs import Retry, Snooze, Transaction
from .calling import called_alone, shown
from .message import Message, Record
from .subscription import Decoder, Dedup, Start, Subscription

__all__ = ["TypedSubscription", "Unknown"]

log = logging.getLogger("sidings.consumer")

H = TypeVar("H", bound=Callable[..., Awaitable[object]])

Unknown = Literal["park", "skip", "fail"]

_LOOK_AGAIN_SECONDS = 60.0  # at a stored message: another release may run then


class TypedSubscription(Subscription[Any]):
    """Messages of one topic by their type, made by ``Service.topic``; `on` declares the handlers."""

    def __init__(
        self,
        topic: str,
        *,
        type_header: str | None = None,
        type_field: str | None = None,
        unknown: Unknown = "park",
        retry: Retry | None = None,
        isolate: bool = False,
        start: Start = "earliest",
        timeout: float | None = 30.0,
        dedup: Dedup = False,
        max_waiting: int | None = None,
    ) -> None:
        if bool(type_header) == bool(type_field):
            raise ConfigurationError(
                f"{topic}: say where a message's type stands: type_header='ce_type' (CloudEvents), type_header='type', "
                "…, or type_field='type' for a field of the JSON value"
            )
        for name, given in (("type_header", type_header), ("type_field", type_field)):
            text = isinstance(given, str) and (name == "type_header" or all(given.split(".")))
            if given is not None and not text:
                raise ConfigurationError(f"{topic}: {name}={given!r}: give a name, such as 'type'")
        if unknown not in ("park", "skip", "fail"):
            raise ConfigurationError(f"{topic}: unknown={unknown!r}: give 'park', 'skip' or 'fail'")
        super().__init__(
            topic,
            self._take_unknown,
            model=bytes | None,
            retry=retry,
            isolate=isolate,
            start=start,
            timeout=timeout,
            dedup=dedup,
            max_waiting=max_waiting,
        )
        self._header = type_header
        self._path = [] if type_field is None else type_field.split(".")
        self._unknown: Unknown = unknown
        self._routes: dict[str | None, Subscription[Any]] = {}
        self._missed: set[str] = set()  # what has been told of stored messages without a handler

    def on(
        self,
        type: str | None,
        *,
        model: Any = None,
        batch: int | None = None,
        decoder: Decoder | None = None,
    ) -> Callable[[H], H]:
        """Handle the messages of one type::

            @transports.on("TransportPlanned")
            async def on_planned(message: Message[TransportPlanned], tx: Transaction) -> None: ...

        Args:
            type: None: the messages that have none, such as tombstones.
            model: Of the whole JSON value, as in ``Service.consumer``.
            batch: The handler gets lists of up to so many messages that follow each other in one partition and are all
                of this type, so that order is kept.
            decoder: Of the whole value, as in ``Service.consumer``.

        Returns:
            A decorator, which gives the handler back as ``Service.consumer`` does.

        Raises:
            ConfigurationError: The declaration cannot work, or the type has a handler already. The decorator raises it
                too.
        """
        if type is not None and not isinstance(type, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            # Without parentheses this is the handler, and nothing would be declared.
            raise ConfigurationError(
                f"{self.topic}: on({getattr(type, '__name__', repr(type))}): name the type, as its messages do, as in "
                "@….on('SomeType')"
            )

        def declare(handler: H) -> H:
            if type in self._routes:
                raise ConfigurationError(f"{self.topic}: two handlers are declared for the type {type!r}")
            self._routes[type] = Subscription(self.topic, cast(Any, handler), model=model, batch=batch, decoder=decoder)
            return called_alone(handler)

        return declare

    def check(self) -> None:
        """Called when the service starts.

        Raises:
            ConfigurationError: No handler is declared.
        """
        if not self._routes:
            raise ConfigurationError(
                f"the topic {self.topic!r} has no handler: declare one with @….on('SomeType'), or leave the topic out"
            )

    def decode(self, record: Record) -> Message[Any]:
        """Decode `record` as its type's handler wants it.

        Raises:
            UndecodableMessage: The value does not fit; or no handler takes the type, and such messages are parked.
        """
        type = self._type_of(record)
        route = self._routes.get(type)
        if route is None and self._unknown == "park":
            raise UndecodableMessage(self._no_handler(type))
        message = super().decode(record) if route is None else route.decode(record)
        message.type = type
        return message

    def call_handler(self, messages: list[Message[Any]], tx: Transaction) -> Awaitable[object]:
        """Run the handler of these messages' type."""
        route = self._routes.get(messages[0].type)
        return super().call_handler(messages, tx) if route is None else route.call_handler(messages, tx)

    def batch_of(self, message: Message[Any] | None) -> int:
        """Most messages in one call with `message`."""
        route = None if message is None else self._routes.get(message.type)
        return 1 if route is None else route.batch_of(message)

    @property
    def largest_batch(self) -> int:
        """Most messages in any call."""
        return max((route.largest_batch for route in self._routes.values()), default=1)

    def passes_over(self, message: Message[Any]) -> bool:
        """Whether `message` is of no interest."""
        return self._unknown == "skip" and message.type not in self._routes

    def check_stored(self, message: Message[Any]) -> None:
        """A type that this release does not know, as while another one is rolled out, or was rolled back: the message
        is neither passed over nor given up. Raises `Snooze`."""
        if message.type in self._routes:
            return
        why = self._no_handler(message.type)
        if why not in self._missed:
            self._missed.add(why)
            log.warning(
                "%s: stored messages wait, and later ones of their keys: %s. Declare one, or end them, where no "
                "release has one any more (`sidings groups list` has them, `sidings groups skip` ends one)",
                *(self.topic, why),
            )
        raise Snooze(_LOOK_AGAIN_SECONDS, why)

    async def _take_unknown(self, message: Message[bytes | None], tx: Transaction) -> None:
        raise UnknownMessageType(self._no_handler(message.type))

    def _no_handler(self, type: str | None) -> str:
        known = ", ".join(sorted(repr(known) for known in self._routes))
        what = "messages without a type" if type is None else f"the type {shown(type)}"
        return f"there is no handler for {what}; known: {known}"

    def _type_of(self, record: Record) -> str | None:
        if self._header is not None:
            raw = next((value for name, value in reversed(record.headers) if name == self._header), None)
            try:
                # A header may be null, whatever aiokafka's annotations say.
                return None if raw is None else raw.decode()  # pyright: ignore[reportUnnecessaryComparison]
            except UnicodeDecodeError as error:
                raise UndecodableMessage(f"the header {self._header!r}, its type, is no text: {error}") from error
        if record.value is None:
            return None
        try:
            found: Any = from_json(record.value)
        except ValueError as error:
            raise UndecodableMessage(f"its type cannot be found: {error}") from error
        for name in self._path:
            found = cast(Mapping[str, Any], found).get(name) if isinstance(found, dict) else None
        if found is not None and not isinstance(found, str):
            field = ".".join(self._path)
            raise UndecodableMessage(f"the field {field!r}, its type, is {shown(found)}: it must be a text")
        return found
