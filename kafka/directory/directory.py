"""The directory as a service author sees it: what it is of, what it offers, and its life."""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast, overload

from prometheus_client import REGISTRY, CollectorRegistry

from ...errors import ConfigurationError, DirectoryBehind, DirectoryNotReady
from ...exposition import show, show_no_more
from ...supervision import raise_only
from ...waiting import set_within
from ..checks import check_loop, check_seconds
from ..message import check_topic
from ..settings import KafkaSettings
from ..subscription import Decoder
from .callbacks import Callbacks, Changed
from .follower import Follower
from .memory import Memory
from .metrics import DirectoryMetrics, Figures
from .rows import BadRecord, KeyOf, Rows
from .storage import Storage

__all__ = ["Directory"]

log = logging.getLogger("sidings.directory")

T = TypeVar("T")
D = TypeVar("D")
F = TypeVar("F", bound=Callable[[Changed[Any]], object])

_ITS_OWN = "that the directory runs in"
_UNREACHABLE_SECONDS = 15.0  # without Kafka, before the health check complains
_SILENT_SECONDS = 60.0  # without an answer of Kafka, before the health check complains


class Directory(Generic[T]):
    """An in-process, always current replica of a compacted topic::

        async with Directory("terminal-acquirer", kafka="localhost:9092", model=TerminalAcquirer) as terminals:
            acquirer = terminals["T-1"].acquirer_id

    In a service it is declared with ``Service.directory``, which says what most arguments mean. See docs/directories.md
    for the rest. Besides its methods it has ``directory[key]``, ``in``, ``len`` and iteration over the keys. Values are
    shared: do not change them.

    Args:
        kafka: Bootstrap servers, or `KafkaSettings`.
        load_seconds: How long the load may take from Kafka's first answer on. None: any time.
        service: A label of its metrics.
        prometheus: Where its metrics are registered.

    Raises:
        ConfigurationError: The declaration cannot work.
    """

    def __init__(
        self,
        topic: str,
        *,
        kafka: str | KafkaSettings,
        model: type[T] | None = None,
        decoder: Decoder | None = None,
        key: KeyOf[T] | None = None,
        active: str | None = "is_active",
        storage: Storage[T] | None = None,
        load_seconds: float | None = 300.0,
        service: str = "",
        prometheus: CollectorRegistry = REGISTRY,
    ) -> None:
        check_topic(topic, "directory")
        check_seconds(load_seconds, "load_seconds", f"directory {topic!r}")
        if (storage is not None and not callable(getattr(storage, "apply", None))) or isinstance(storage, type):
            raise ConfigurationError(
                f"directory {topic!r}: storage={storage!r}: give SQLite(path), one of your own, or None for memory"
            )
        self.topic = topic
        self.service = service
        if not isinstance(kafka, str | KafkaSettings):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"directory {topic!r}: kafka={kafka!r}: give 'host:port', or KafkaSettings(...)")
        if not isinstance(prometheus, CollectorRegistry):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"directory {topic!r}: prometheus={prometheus!r}: give a CollectorRegistry")
        self._settings = KafkaSettings(bootstrap=kafka) if isinstance(kafka, str) else kafka
        self._load_seconds = load_seconds
        self._storage: Storage[T] = Memory() if storage is None else storage
        self._rows = Rows(topic, model=model, decoder=decoder, key=key, active=active)
        self._callbacks = Callbacks[T](topic)
        self._loaded = asyncio.Event()
        self._follower = Follower(
            topic, self._settings, self._rows, self._storage, self._callbacks, self._finish_loading
        )
        self._prometheus = prometheus
        self._began: float | None = None
        self._load_took: float | None = None
        self._running: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that it runs in

    # -- reading ----------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Hashable) -> T:
        """The value of `key`.

        Raises:
            KeyError: There is none.
            DirectoryNotReady: The load has not ended yet.
            Snooze: As from `get`.
        """
        if (value := self.get(key)) is None:
            raise KeyError(key)
        return value

    @overload
    def get(self, key: Hashable) -> T | None: ...
    @overload
    def get(self, key: Hashable, default: D) -> T | D: ...
    def get(self, key: Hashable, default: object = None) -> object:
        """The value of `key`, or `default`.

        Raises:
            DirectoryNotReady: The load has not ended yet.
            Snooze: With `SQLite`, whose rows are decoded when they are read: that of your decoder, or validator.
        """
        if self._load_took is None:
            raise self._not_ready()
        value = self._storage.get(key)
        return default if value is None else value

    def __contains__(self, key: Hashable) -> bool:
        return self.get(key) is not None

    def __len__(self) -> int:
        if self._load_took is None:
            raise self._not_ready()
        return len(self._storage)

    def __bool__(self) -> bool:
        """True: that it is empty is asked with ``len``."""
        return True

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.keys())

    def keys(self) -> list[Hashable]:
        """All keys, as they are now: a list of its own, which does not change."""
        return [key for key, _ in self.items()]

    def values(self) -> list[T]:
        """All values, as they are now."""
        return [value for _, value in self.items()]

    def items(self) -> list[tuple[Hashable, T]]:
        """All keys and values, as they are now.

        Raises:
            DirectoryNotReady: The load has not ended yet. `keys` and `values` raise it as well.
            Snooze: As from `get`, and from `keys` and `values` too.
        """
        if self._load_took is None:
            raise self._not_ready()
        return self._storage.items()

    # -- changes ----------------------------------------------------------------------------------------------------

    @overload
    def on_change(self, function: F, *, load: bool = ...) -> F: ...
    @overload
    def on_change(self, *, load: bool) -> Callable[[F], F]: ...
    def on_change(self, function: F | None = None, *, load: bool | None = None) -> F | Callable[[F], F]:
        """Call `function` for each key whose value has changed, with what was and what is::

            @terminals.on_change
            def changed(change: Changed[TerminalAcquirer]) -> None:
                log.info("%s: %s -> %s", change.key, change.old, change.new)

        It is called between two batches, when all of a batch is in the directory: of several changes of a key in one
        batch it sees the last. What it raises is logged and counted.

        Args:
            load: Whether it is also called for the load: once the load is complete, and before the directory is ready,
                for each key that is there then, with ``old=None``. So what it builds of them, by
                ``@terminals.on_change(load=True)``, is complete when handlers run, and follows. The directory itself
                cannot be read yet.

        Returns:
            The function, unchanged; without one, a decorator.

        Raises:
            ConfigurationError: It is an ``async def``, or does not take one argument; or the directory has been started
                before, with `load`.
        """
        if load not in (None, False, True):
            raise ConfigurationError(f"directory {self.topic!r}: on_change(load={load!r}): give True or False")
        if load and self._began is not None:
            raise ConfigurationError(
                f"directory {self.topic!r}: on_change(load=True) comes after its start: declare it before"
            )

        def declare(function: F) -> F:
            self._callbacks.add(function, load=bool(load))
            return function

        return declare if function is None and load is not None else declare(cast(F, function))

    async def wait_until(
        self, offset: int | Mapping[int, int] | None = None, *, partition: int = 0, timeout: float | None = None
    ) -> None:
        """Return when the directory has got so far::

            await terminals.wait_until(offset, partition=0, timeout=5)

        Args:
            offset: Of a message in `partition`: until that is applied. Or positions, as `end_offsets` gives them. None:
                until all that is in the topic now is applied.
            timeout: Seconds. None: any time.

        Raises:
            DirectoryBehind: It is not there after `timeout`, and the message says what was missing; or it has ended; or
                its topic was made anew, or cut off, and ends before.
            ConfigurationError: This is another event loop than that which it runs in, or `offset` is none of these.
        """
        check_loop(self._loop, _ITS_OWN)
        wanted: Mapping[int, int] | None = {partition: offset + 1} if isinstance(offset, int) else offset
        if wanted is not None and not _are_positions(wanted):
            raise ConfigurationError(
                f"directory {self.topic!r}: wait_until({offset!r}, partition={partition!r}): give an offset, a number, "
                "or positions as end_offsets() gives them: {partition: offset}, both numbers"
            )
        try:
            async with asyncio.timeout(timeout):
                if wanted is None:
                    wanted = await self.end_offsets()
                while not await self._follower.wait_for(wanted):
                    if offset is not None:
                        raise DirectoryBehind(
                            f"directory {self.topic!r}: its topic was made anew, or cut off, since wait_until() was "
                            f"called, and ends before: {self._follower.missing(wanted)}. "
                            "Offsets of before tell nothing of it"
                        )
                    wanted = await self.end_offsets()
        except TimeoutError:
            told = "it has not been started" if self._began is None else self._follower.missing(wanted)
            raise DirectoryBehind(f"directory {self.topic!r} is not there after {timeout} s: {told}") from None

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Return when it is `ready`.

        Args:
            timeout: Seconds. None: any time.

        Raises:
            DirectoryNotReady: `timeout` is over, or the directory has ended before.
            ConfigurationError: This is another event loop than its own.
        """
        check_loop(self._loop, _ITS_OWN)
        if not await set_within(self._loaded, timeout) or not self.ready:
            raise self._not_ready()

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether all is applied that was in the topic at the start, and its rows are not all bad (docs/directories.md,
        "Starting")."""
        return self._load_took is not None

    @property
    def start_seconds(self) -> float:
        """How long it took from the start to `ready`, or has taken until now."""
        if self._load_took is not None:
            return self._load_took
        return 0.0 if self._began is None else time.monotonic() - self._began

    @property
    def progress(self) -> float:
        """How much of what was in the topic at the start is applied: 0 to 1."""
        return 1.0 if self.ready else self._follower.progress.fraction

    def positions(self) -> dict[int, int]:
        """The next offset of each partition: what is before has been applied."""
        return dict(self._follower.progress.positions)

    async def end_offsets(self) -> dict[int, int]:
        """The end of each partition, now: what a position has to reach. Waits for Kafka.

        Raises:
            DirectoryBehind: The directory has ended.
            ConfigurationError: This is another event loop than its own.
        """
        check_loop(self._loop, _ITS_OWN)
        return await self._follower.end_offsets()

    def errors(self) -> list[BadRecord]:
        """Records that could not be applied and still matter, oldest first.

        The former value of the row is in force; a good record of the same row ends the error. Of more than 1,000 it
        gives the last ones; and of each partition the first one before these, until all before these have ended.
        """
        return list(self._follower.faults)

    def problems(self) -> list[str]:
        """What a health check should complain about; empty when all is well. Any thread may call it."""
        follower = self._follower
        reader, failing_since = follower.reader, follower.failing_since
        if follower.ended:
            return [f"directory {self.topic!r} is read no more: it has ended"]
        if failing_since is not None and time.monotonic() - failing_since > _UNREACHABLE_SECONDS:
            return [f"directory {self.topic!r}: {follower.failure}"]
        if reader is None:
            return []
        found = [f"directory {self.topic!r}: {told}" for told in list(reader.unreadable.values())]
        lost_since = reader.lost_since
        if lost_since is not None and (lost := time.monotonic() - lost_since) > _UNREACHABLE_SECONDS:
            found.append(f"directory {self.topic!r}: none of the brokers that it knows has answered for {lost:.0f} s")
        elif (silence := reader.silence()) > _SILENT_SECONDS:
            found.append(f"directory {self.topic!r}: Kafka is silent for {silence:.0f} s{reader.why_silent}")
        return found

    def not_ready(self) -> list[str]:
        """Why it is not ready; empty when it is. Any thread may call it."""
        return [] if self.ready else [str(self._not_ready())]

    # -- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Load, and follow until `stop`. Kafka may come and go.

        Raises:
            DirectoryNotReady: The load has taken longer than it may; the message says how far it is.
            StorageError: The store cannot be used.
            ConfigurationError: The directory has been started before.
        """
        if self._began is not None:
            raise ConfigurationError(f"directory {self.topic!r} has been started before: make another one")
        self._began, self._loop = time.monotonic(), asyncio.get_running_loop()
        metrics = DirectoryMetrics(self._figures)
        show(metrics, self._prometheus)
        try:
            async with asyncio.TaskGroup() as group:
                limit = group.create_task(self._limit_load())
                await self._follower.run()
                limit.cancel()
        except BaseExceptionGroup as errors:
            raise_only(errors)
        finally:
            show_no_more(metrics, self._prometheus)
            self._loaded.set()  # nobody needs to wait any more

    def stop(self) -> None:
        """Let `run` return soon."""
        self._follower.stop()

    async def __aenter__(self) -> Self:
        """Start, and return when it is ready.

        Raises:
            DirectoryNotReady: The load has taken longer than it may; the message says how far it is.
            StorageError: The store cannot be used.
        """
        running = asyncio.create_task(self.run(), name=f"sidings directory {self.topic}")
        loaded = asyncio.create_task(self._loaded.wait())
        try:
            await asyncio.wait([running, loaded], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
        except BaseException:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            raise
        finally:
            loaded.cancel()
        self._running = running
        running.add_done_callback(self._tell_end)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        if self._running is not None:
            await self._running

    def _tell_end(self, running: asyncio.Task[None]) -> None:
        """Where no service runs it, nobody else does until the block is left."""
        if not running.cancelled() and (error := running.exception()) is not None:
            log.critical("directory %r has ended, and does not follow its topic any more: %s", self.topic, error)

    async def _limit_load(self) -> None:
        """Waiting for Kafka takes as long as it takes; the load itself does not."""
        await self._follower.contact.wait()
        if not await set_within(self._loaded, self._load_seconds):
            raise DirectoryNotReady(
                f"{self._not_ready()}. It has had load_seconds={self._load_seconds} since Kafka first answered"
            )

    def _finish_loading(self) -> None:
        self._load_took = self.start_seconds
        self._loaded.set()
        bad = len(self._follower.faults)
        told = f"; {bad} rows are bad, as errors() tells" if bad else ""
        log.log(
            logging.WARNING if bad else logging.INFO,
            "directory %r is ready after %.2f s: %s entries%s",
            *(self.topic, self._load_took, len(self._storage), told),
        )

    def _figures(self) -> Figures:
        follower = self._follower
        return Figures(
            self.service,
            self.topic,
            self.ready,
            self.start_seconds,
            follower.stale_seconds,
            len(self._storage),
            follower.stored,
            follower.deleted,
            follower.faults.total,
            len(follower.faults),
            follower.rebuilds,
            self._callbacks.failures,
            self.positions(),
            dict(follower.progress.tails),
        )

    def _not_ready(self) -> DirectoryNotReady:
        follower = self._follower
        told = follower.trouble or follower.progress.describe(follower.progress.barrier)
        if (reader := follower.reader) is not None:
            told = "; ".join([told, *list(reader.unreadable.values())])
        if self._began is None:
            told = "it has not been started"
        elif follower.ended:
            told = f"it has ended; {told}"
        return DirectoryNotReady(f"directory {self.topic!r} is not loaded: {told}")


def _are_positions(given: object) -> bool:
    """Whether they can be reached: what stands for a number, as a text, no position equals."""
    return isinstance(given, Mapping) and all(
        isinstance(number, int)
        for number in [*given, *given.values()]  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    )
