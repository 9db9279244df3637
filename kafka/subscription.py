"""One topic's declaration: how its messages are decoded, who handles them, and what happens when that fails."""

import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from tenacity import stop_after_attempt, wait_exponential, wait_random

from ..errors import ConfigurationError, UndecodableMessage
from ..jobs import Again, ErrorInfo, Job, Outcome, OutcomeName, Registry, Retry, Transaction
from ..jobs.handlers import bare, check_listed, check_no_method, model_of, why_not_called
from ..jobs.middleware import Call, Middleware, call_through, completed
from ..jobs.payloads import adapter_of
from .calling import puts_off, shown, told_of, working_on
from .checks import check_count, check_function, check_seconds
from .message import Message, Record, StoredMessage
from .outbox import MESSAGE_ID
from .seen import short_id

__all__ = ["MESSAGE_PREFIX", "Decoder", "Dedup", "Start", "Subscription"]

log = logging.getLogger("sidings.consumer")

T = TypeVar("T")

Start = Literal["earliest", "latest", "committed", "fail"]
Decoder = Callable[[Message[bytes | None]], Any]
Dedup = bool | str | Callable[[Message[Any]], str | bytes | None]

MESSAGE_PREFIX = "message:"  # begins the types of jobs that are stored messages; a partial index relies on it
_BROKEN_POLICY_SECONDS = 60.0
# A batch with an id that was recorded before midnight must not be open an hour after it. It takes `batch_seconds` more.
_MAX_DEDUP_SECONDS = 1_800.0


class Subscription(Generic[T]):
    """A topic and its handler, made by ``Service.consumer``; see there."""

    arguments = 2  # that the handler takes
    form = "`async def`, and must take a message and a transaction"  # the handler's, as an error says it
    exhausted = (  # why a policy cannot say what follows the last attempt, and what to do
        "without isolate=True: leave it out, and a message that is given up is parked, and tried on in its key's "
        "order, or give isolate=True and 'hold' to have it wait for a person"
    )
    followed = "and let the handler enqueue a job whose type has it in its retry="

    def __init__(
        self,
        topic: str,
        handler: Callable[..., Awaitable[object]],
        *,
        model: Any = None,
        batch: int | None = None,
        decoder: Decoder | None = None,
        retry: Retry | None = None,
        isolate: bool = False,
        start: Start = "earliest",
        timeout: float | None = 30.0,
        dedup: Dedup = False,
        max_waiting: int | None = None,
    ) -> None:
        self._check_handler(handler, topic)
        check_count(batch, "batch", topic, "a positive number, or None for single messages")
        check_listed(handler, topic, Message, batch, batches=self.arguments > 1)
        if not isinstance(isolate, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"{topic}: isolate={isolate!r}: give True or False")
        if start not in ("earliest", "latest", "committed", "fail"):
            raise ConfigurationError(f"{topic}: start={start!r}: give 'earliest', 'latest', 'committed' or 'fail'")
        check_seconds(timeout, "timeout", topic)
        check_function(decoder, "decoder", topic, "the message")
        _check_dedup(dedup, topic, timeout)
        check_count(max_waiting, "max_waiting", topic, "a positive number of jobs, or None")
        self.topic = topic
        self.handler = handler
        self.middleware: Sequence[Middleware] = ()  # of the service
        self.batch = batch
        self.isolate = isolate
        self.start: Start = start
        self.timeout = timeout
        self.max_waiting = max_waiting
        self.dedup: Dedup = dedup
        self._missing_id = False  # whether a message without an id has been told of
        self.retry = Retry.given(retry, topic) or Retry(
            wait=wait_exponential(multiplier=0.2, max=10) + wait_random(0, 0.2), stop=stop_after_attempt(5)
        )
        self._check_retry(self.retry)
        self.job_retry = (isolate and retry) or Retry()  # a stored message is never given up
        self.job_type_name = MESSAGE_PREFIX + topic
        self._decoder = decoder
        if model is None and decoder is None:
            model = model_of(handler, topic, Message, batch is not None, "model")
        self._raw = decoder is None and bare(model) in (bytes, bytes | None)
        adapter = None if self._raw or model is None else adapter_of(model, topic)
        # As `validate_json` and `validate_python`, in less time.
        self._validate_json = adapter and adapter.validator.validate_json
        self._validate_python = adapter and adapter.validator.validate_python

    def _check_handler(self, handler: Callable[..., object], topic: str) -> None:
        check_no_method(handler, topic, "service.consumer(...)")
        why = why_not_called(handler, self.arguments)
        if why or not inspect.iscoroutinefunction(handler):
            raise ConfigurationError(f"the handler of {topic!r} must be {self.form}{f': {why}' if why else ''}")

    def _check_retry(self, retry: Retry) -> None:
        if retry.judges_results:
            raise ConfigurationError(
                f"{self.topic}: retry=Retry(retry=...) with retry_if_result, or a strategy of your own: nothing judges "
                "what the handler of a message returns: raise an error in it, and give retry_if_exception(...), or for "
                "your own, asked about errors only, retry_all(retry_if_exception_type(Exception), own)"
            )
        if retry.follow_up is not None:
            raise ConfigurationError(
                f"{self.topic}: on_exhausted={retry.follow_up.name}: a job follows only a job, and this is a message: "
                f"leave it out, {self.followed}"
            )
        if retry.on_exhausted != "skip" and not self.isolate:
            raise ConfigurationError(f"{self.topic}: on_exhausted={retry.on_exhausted!r} {self.exhausted}")
        if retry.on_exhausted == "block":
            raise ConfigurationError(
                f"{self.topic}: on_exhausted='block' with isolate=True: leave stop= out, and later messages of its key "
                "wait behind one that fails, or give 'hold' to have it wait for a person outside of its key's order"
            )

    def check(self) -> None:
        """Called when the service starts. Raises `ConfigurationError` where a declaration is incomplete."""

    def decode(self, record: Record) -> Message[T]:
        """Decode `record`. Raises `UndecodableMessage`, and the `Snooze` of who cannot do so now."""
        value: Any = record.value
        try:
            if self._decoder is not None:
                value = self._decoder(_message(value, record))
                if self._validate_python is not None:
                    value = self._validate_python(value)
            elif self._validate_json is not None:
                value = self._validate_json(b"null" if value is None else value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a decoder may raise anything; whatever it is, the message is kept
            if puts_off(error):
                raise
            raise UndecodableMessage(told_of(error)) from error
        return _message(value, record)

    async def call(self, messages: list[Message[T]], tx: Transaction) -> None:
        """Run the handler inside of the service's middleware: with the list, or with the only message."""
        if self.middleware:
            # A tuple: the handler may use its list up.
            call = Call(self.topic, messages[0].origin, messages=tuple(messages), tx=tx)
            await call_through(self.middleware, call, partial(self.call_handler, messages, tx))
        else:
            await completed(await self.call_handler(messages, tx))

    def call_handler(self, messages: list[Message[T]], tx: Transaction) -> Awaitable[object]:
        """Run the handler itself."""
        return self.handler(messages if self.batch is not None else messages[0], tx)

    def outcome_of(self, error: Exception, failures: int, elapsed: float) -> Outcome:
        """What follows from a failure of the handler. failures: those before it; elapsed: seconds since the first."""
        try:
            return self.retry.decide(error, failures=failures, elapsed=elapsed)
        except Exception as broken:  # a user's own wait_ or stop_ strategy: the message must not be lost over it
            log.exception("%s: its retry policy failed; again in %s s", self.topic, _BROKEN_POLICY_SECONDS)
            return Again(OutcomeName.RETRIED, _BROKEN_POLICY_SECONDS, ErrorInfo.of(broken))

    def batch_of(self, message: Message[Any] | None) -> int:
        """Most messages in one call of the handler that takes `message`."""
        return self.batch or 1

    @property
    def largest_batch(self) -> int:
        """Most messages in any call."""
        return self.batch or 1

    def passes_over(self, message: Message[T]) -> bool:
        """Whether `message` is of no interest, so that only its offset counts."""
        return False

    def check_stored(self, message: Message[T]) -> None:
        """Called before a stored message is handled. Raises `Snooze` where this release cannot."""

    def id_of(self, record: Record, message: Message[T] | None) -> bytes | None:
        """What tells repeats of a message, where that is asked for; a message without an id is handled as it comes.

        message: None where it cannot be decoded. Raises `UndecodableMessage` where a function of the author's fails,
        and its `Snooze`.
        """
        if not self.dedup:
            return None
        found: Any  # an author's function may return anything
        if isinstance(self.dedup, bool | str):
            name = MESSAGE_ID if self.dedup is True else self.dedup
            found = next((value for key, value in reversed(record.headers) if key == name), None)
        elif message is None:
            return None
        else:
            try:
                found = self.dedup(message)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if puts_off(error):
                    raise
                raise UndecodableMessage(f"dedup= failed: {told_of(error)}") from error
        if found is None or found == b"" or found == "":
            if not self._missing_id:
                self._missing_id = True
                log.warning("%s: a message without an id, whose repeats cannot be told: %s", self.topic, record.offset)
            return None
        if not isinstance(found, str | bytes):
            raise UndecodableMessage(f"dedup= returned {shown(found)}: it must be str, bytes or None")
        # Surrogates, as `json.loads` gives them, are no UTF-8, but tell ids apart all the same.
        return short_id(self.topic, found.encode(errors="surrogatepass") if isinstance(found, str) else found)

    def register(self, registry: Registry) -> None:
        """Declare the job type of this topic's stored messages: transactional, so that their effects happen once."""

        async def handle(job: Job[StoredMessage]) -> None:
            message = self.decode(job.payload.record())
            self.check_stored(message)
            with working_on(message):
                await self.call([message], job.tx)

        self.middleware = registry.middleware
        declare = registry.job(
            name=self.job_type_name,
            payload=StoredMessage,
            retry=self.job_retry,
            timeout=self.timeout,
            transactional=True,
        )
        declare(handle).wrapped = False  # what it calls is wrapped


def _check_dedup(dedup: Dedup, topic: str, timeout: float | None) -> None:
    if dedup == "" or not (isinstance(dedup, bool | str) or callable(dedup)):
        raise ConfigurationError(
            f"{topic}: dedup={dedup!r}: give True for the header {MESSAGE_ID!r}, the name of another header, or a "
            "function of the message that returns its id"
        )
    if callable(dedup):
        check_function(dedup, "dedup", topic, "the message")
    if dedup and (timeout is None or timeout > _MAX_DEDUP_SECONDS):
        raise ConfigurationError(
            f"{topic}: timeout={timeout!r} with dedup=: give at most {_MAX_DEDUP_SECONDS:.0f} s, for which two "
            "handlers of messages with one id may have to wait for each other"
        )


def _message(value: Any, record: Record) -> Message[Any]:
    return Message(value, record.topic, record.partition, record.offset, record.timestamp, record.key, record.headers)
