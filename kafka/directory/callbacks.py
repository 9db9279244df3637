"""What a service author wants to be told of changes."""

import asyncio
import inspect
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from ...errors import ConfigurationError
from ..calling import shown
from ..checks import check_function
from .rows import Change
from .storage import Storage

__all__ = ["Callbacks", "Changed"]

log = logging.getLogger("sidings.directory")

T = TypeVar("T")

_TURN = 1_000  # rows of the load that are told of without a pause


class Changed(NamedTuple, Generic[T]):
    """A key whose value is another one now.

    Attributes:
        old: None where the key is new.
        new: None where the key was deleted.
    """

    key: Hashable
    old: T | None
    new: T | None


class Callbacks(Generic[T]):
    """Functions that are told of changes. failures: how often one has raised."""

    def __init__(self, topic: str) -> None:
        self.failures = 0
        self._topic = topic
        self._functions: list[Callable[[Changed[T]], object]] = []
        self._of_load: list[Callable[[Changed[T]], object]] = []  # those that are told of the load, too
        self._untold: dict[Hashable, T | None] = {}  # what it was before

    def add(self, function: Callable[[Changed[T]], object], *, load: bool) -> None:
        """Tell this one too; with `load` also of what the load brings. Raises `ConfigurationError`."""
        if inspect.iscoroutinefunction(function):
            raise ConfigurationError(
                f"directory {self._topic!r}: on_change takes a plain function, which is called between two batches: "
                "let it put the change into an asyncio.Queue, or set an Event, for a task of yours"
            )
        if function is None:  # pyright: ignore[reportUnnecessaryComparison] - callers may be unchecked
            raise ConfigurationError(f"directory {self._topic!r}: on_change(None): give a function")
        check_function(function, "on_change", f"directory {self._topic!r}", "the change")
        self._functions.append(function)
        if load:
            self._of_load.append(function)

    async def tell_load(self, storage: Storage[T]) -> None:
        """Tell those that want to know of all that stands there. Nothing is applied meanwhile. Raises the `Snooze` of
        who cannot decode a row now, before it tells of any."""
        if not self._of_load:
            return
        items = await asyncio.to_thread(storage.items)  # of a file it takes long
        for number, (key, value) in enumerate(items, 1):
            self._tell(self._of_load, Changed(key, None, value))
            if number % _TURN == 0:
                await asyncio.sleep(0)

    def before(self, storage: Storage[T], changes: Sequence[Change[T]]) -> None:
        """Keep the values of all keys that `changes` may change. Raises the `Snooze` of who cannot decode one now."""
        if not self._functions:
            return
        keys = {change[1] for change in changes if change[2] is not None}
        keys.update(storage.keys_of({change[0] for change in changes}))
        self._untold = {key: storage.get(key) for key in keys} | self._untold

    def after(self, storage: Storage[T]) -> None:
        """Tell of those that have another value than before. Raises the `Snooze` of who cannot decode one now; the next
        call tells of the rest."""
        for key, old in list(self._untold.items()):
            new = storage.get(key)
            del self._untold[key]
            if _differ(old, new):
                self._tell(self._functions, Changed(key, old, new))

    def _tell(self, functions: Sequence[Callable[[Changed[T]], object]], change: Changed[T]) -> None:
        for function in functions:
            try:
                function(change)
            except KeyboardInterrupt:
                raise
            except BaseException:  # whatever a callback raises, the directory goes on
                self.failures += 1
                log.exception("directory %r: on_change failed for %s", self._topic, shown(change.key))


def _differ(old: object, new: object) -> bool:
    try:
        return bool(new != old)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - an author's values; those that do not tell are told of once too often
        return True
