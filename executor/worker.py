"""One worker of an executor, and why what it runs may be cancelled."""

import asyncio
from concurrent.futures import Future
from enum import Enum

from .clock import now
from .queues import Entry

__all__ = ["CancelReason", "Worker"]


class CancelReason(Enum):
    """Why a running handler is cancelled, and so what its attempt counts as."""

    TIMEOUT = "its timeout"  # a failure
    STOPPING = "its executor gives the origin up"  # runs again elsewhere, no failure
    FENCED = "another executor has the origin"  # nothing: the attempt is not ours any more
    ENDED = "somebody has ended the job"  # nothing: it is recorded already


class Worker:
    """One coroutine that runs one job after the other."""

    __slots__ = ("call", "cancelled", "entry", "given", "reason", "started", "stop_at", "task", "type", "wake")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.entry: Entry | None = None  # the job that runs now; the watchdog reads it from its thread
        self.call: Future[object] | None = None  # the plain function that runs, in its thread
        self.started = 0.0
        self.cancelled = 0.0  # when, if there is a `reason`
        self.stop_at: float | None = None
        self.reason: CancelReason | None = None
        self.given: set[CancelReason] = set()  # all reasons so far, if there is a `reason`
        self.wake: asyncio.Future[None] | None = None
        self.type: str | None = None  # of the job that runs, or ran last; none while it is idle

    def limit(self, seconds: float | None) -> None:
        """The handler may take so long from now on; None: any time."""
        self.stop_at = None if seconds is None else now() + seconds

    def cancel(self, reason: CancelReason) -> None:
        """Cancel the running handler, once for each reason: it may have swallowed the one before. A later reason of
        more weight replaces an earlier one."""
        if self.entry is None or self.task is None or self.task is asyncio.current_task():
            return  # a handler that has just learnt that it is fenced ends by itself
        if reason in self.given:
            return
        self.given.add(reason)
        if self.reason is None:
            self.cancelled, self.reason = now(), reason
        elif reason in (CancelReason.FENCED, CancelReason.ENDED):
            self.reason = reason
        self.task.cancel()

    def leave(self) -> None:
        """Nobody waits any more for what it ran. `entry` stays while a plain function goes on in its thread."""
        if self.call is None or self.call.cancel():
            self.entry = None
        else:
            self.call.add_done_callback(self._left)

    def _left(self, _: object) -> None:
        self.entry = None
