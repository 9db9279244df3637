"""A time limit for each of many calls in a row, with one timer for all of them: `asyncio.timeout` makes one per call,
which costs a batch as much as its messages' decoding."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

__all__ = ["DEAF_SECONDS", "Patience", "cancellation"]

DEAF_SECONDS = 15.0  # after its cancellation: a call that goes on for so long is told of


async def cancellation(task: asyncio.Task[Any]) -> None:
    """Let it come now, to the handler's account, where a handler has cancelled its own task and has awaited nothing
    since: else it comes to what its caller awaits next. None of it stays with the task: of early Pythons 3.11
    `asyncio.timeout` cancels what runs out of time in a task that has once been cancelled."""
    try:
        if not isinstance(sys.exception(), GeneratorExit):
            await asyncio.sleep(0)
    finally:
        while task.cancelling():
            task.uncancel()


class Patience:
    """Lets each call take `seconds` at most; None: any time. For one task::

    with Patience(30) as patience:
        for item in items:
            await patience.call(handle(item))
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._cancelling = 0  # cancellations that were under way before ours
        self._began: float | None = None  # of the call under way
        self._fired = False
        self._on_deaf: Callable[[], object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self._look()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def call(self, call: Awaitable[object], on_deaf: Callable[[], object] | None = None) -> None:
        """Await `call`. Raises `TimeoutError` when it has been cancelled for taking too long; `on_deaf` is called where
        it goes on all the same."""
        self._began, self._on_deaf = self._loop.time(), on_deaf
        try:
            await call
        except asyncio.CancelledError as error:
            if self._take_back():
                raise TimeoutError(f"it took longer than {self._seconds} s") from error
            raise
        finally:
            self._began = None
            self._take_back()  # it may have swallowed the cancellation
            if self._task is not None and self._task.cancelling():
                await cancellation(self._task)

    def _look(self) -> None:
        """Cancel the call under way if its time is over, and look again when it could be."""
        if self._seconds is None:
            return
        left = self._seconds
        if self._began is not None:
            left = self._began + self._seconds - self._loop.time()
            if left <= 0:
                late, left = -left, min(self._seconds, DEAF_SECONDS)
                if not self._fired and self._task is not None:
                    self._fired = True
                    self._task.cancel()
                elif late >= DEAF_SECONDS and self._on_deaf is not None:
                    self._on_deaf()
        self._timer = self._loop.call_later(left, self._look)

    def _take_back(self) -> bool:
        """Undo our cancellation. Returns whether it was the only one."""
        if not self._fired or self._task is None:
            return False
        self._fired = False
        return self._task.uncancel() <= self._cancelling
