"""The watchdog thread: looks at the clock when the event loop cannot."""

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from .clock import now
from .leases import LeaseThread, tell_loop
from .queues import Entry
from .settings import ExecutorSettings
from .worker import CancelReason
from .workers import Workers

__all__ = ["EXIT_CODE", "Watchdog"]

log = logging.getLogger("sidings.watchdog")

EXIT_CODE = 70
_NOTICE_SECONDS = 5.0  # how long a handler may take to end when it has been cancelled


@dataclass(frozen=True, slots=True)
class Deaf:
    """A handler that takes no notice of its cancellation; seconds since it has started, and since it was cancelled."""

    entry: Entry
    reason: CancelReason
    runs: float
    cancelled: float

    def __str__(self) -> str:
        return (
            f"job {self.entry.id} ({self.entry.type}) has been running for {self.runs:.0f} s, "
            f"although it was cancelled {self.cancelled:.0f} s ago ({self.reason.value})"
        )


class Watchdog:
    """Notices a stalled event loop, handlers that go on after their cancellation, and those that outlive their lease.

    A loop that has not answered for `stall_warn_seconds` is logged with the stack that blocks it; after `stall_seconds`
    its leases are no longer renewed, nor once it is closed. When a lease runs out under a handler that still runs, the
    process ends, because that handler cannot be stopped in any other way and another executor may start its successor
    at any time.

    on_stalled: called in the event loop with the seconds of a stall that was logged and is over.
    """

    def __init__(
        self,
        settings: ExecutorSettings,
        leases: LeaseThread,
        workers: Workers,
        on_stalled: Callable[[float], object],
        exit_process: Callable[[int], object] = os._exit,
    ) -> None:
        self._settings = settings
        self._leases = leases
        self._workers = workers
        self._on_stalled = on_stalled
        self._exit = exit_process
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._asked_at: float | None = None  # None: the event loop has answered
        self._reported = False
        self._told: set[Entry] = set()  # whose handlers take no notice
        self._failing: set[str] = set()  # looks that have raised, and have been told of

    def start(self) -> None:
        """Start watching the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="sidings watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stop.set()

    def stalled_seconds(self) -> float:
        """How long the loop has not answered."""
        asked_at = self._asked_at
        return now() - asked_at if asked_at is not None else 0.0

    def deaf(self, seconds: float = 0.0) -> list[Deaf]:
        """Handlers that go on although they were cancelled so many seconds ago, or more; at least a few."""
        found: list[Deaf] = []
        seconds = max(seconds, _NOTICE_SECONDS)
        time = now()
        for worker in self._workers.all:
            entry, reason, since = worker.entry, worker.reason, worker.cancelled
            # The entry is read again: the worker may have gone on to another job between the looks.
            if entry is not None and reason is not None and time - since >= seconds and worker.entry is entry:
                found.append(Deaf(entry, reason, time - worker.started, time - since))
        return found

    def _look_at_cancelled(self) -> None:
        found = self.deaf()
        self._told &= {handler.entry for handler in found}
        for handler in found:
            if handler.entry not in self._told:
                self._told.add(handler.entry)
                _aside(lambda handler=handler: log.error("%s; till it ends it keeps its worker and its group", handler))

    def _run(self) -> None:
        tick = min(0.25, self._settings.lease_seconds / 30)  # a part of the margin between deadline and lease
        while not self._stop.wait(tick):
            for look in (self._look_at_loop, self._look_at_cancelled, self._look_at_deadlines):
                self._try(look)
        while self._workers.running():  # handlers that could not be stopped, under leases that nobody renews any more
            time.sleep(tick)
            self._try(self._look_at_deadlines)

    def _try(self, look: Callable[[], None]) -> None:
        """Whatever fails in one look, the others and the next ones are made: without them no lease is kept to."""
        try:
            look()
            self._failing.discard(look.__name__)
        except Exception as error:  # noqa: BLE001 - it is logged, once, if that is possible
            if look.__name__ not in self._failing:
                self._failing.add(look.__name__)
                _aside(lambda error=error: log.error("the watchdog has failed, and goes on: %r", error, exc_info=error))

    def _look_at_loop(self) -> None:
        if self._loop is None:
            return
        if self._asked_at is None:
            self._asked_at = now()
            tell_loop(self._loop, self._answer)
            return
        if self._loop.is_closed():
            if not (self._leases.suspended or self._stop.is_set()):
                self._leases.suspended = True
                _aside(lambda: log.error("the event loop was closed, not stopped: its leases are not renewed any more"))
            return
        silent = self.stalled_seconds()
        if silent >= self._settings.stall_warn_seconds and not self._reported:
            self._reported = True
            text, calls = "the event loop has not answered for %.1f s; it is blocked here:\n%s", self._calls()
            _aside(lambda: log.warning(text, silent, _stack(calls)))
        if silent >= self._settings.stall_seconds and not self._leases.suspended:
            self._leases.suspended = True
            end = "the event loop has not answered for %.1f s: its leases are not renewed any more"
            _aside(lambda: log.error(end, silent))

    def _answer(self) -> None:
        silent, reported = self.stalled_seconds(), self._reported
        self._asked_at, self._reported = None, False
        if self._leases.suspended:
            self._leases.suspended = False
            self._leases.renew_soon()
        if reported:
            self._on_stalled(silent)
            log.warning("the event loop answers again after %.1f s", silent)

    def _calls(self) -> list[tuple[str, int, str]]:
        """What the loop's thread is in, the innermost last: file, line, and function. Without the lines' texts, which
        are read from the disk: that may be what blocks the event loop."""
        # The documented way to see another thread's stack, its underscore notwithstanding.
        frame = sys._current_frames().get(self._loop_thread)  # pyright: ignore[reportPrivateUsage]
        calls: list[tuple[str, int, str]] = []
        while frame is not None:
            calls.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        return calls[::-1]

    def _look_at_deadlines(self) -> None:
        if not self._settings.exit_when_fenced:
            return
        time = now()
        closed = self._loop is not None and self._loop.is_closed()
        for worker in self._workers.all:
            if closed and (worker.call is None or worker.call.done()):
                continue  # a coroutine, which goes on no more
            entry = worker.entry
            # The entry is read again: the worker may have gone on to another job between the two looks.
            if entry is not None and time >= entry.origin.deadline and worker.entry is entry:
                _aside(lambda entry=entry: _last_words(entry), wait_seconds=self._settings.margin_seconds / 2)
                self._exit(EXIT_CODE)
                return


def _aside(work: Callable[[], None], *, wait_seconds: float = 0.0) -> None:
    """Log in a thread of its own: that fails where the disk is full, and hangs where the disk does, or where nobody
    reads the pipe that the log goes to, which may be what blocks the event loop. None of it may keep the watchdog from
    its duty."""
    thread = threading.Thread(target=work, name="sidings watchdog's log", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads: then without a word
        return
    thread.join(wait_seconds)


def _stack(calls: list[tuple[str, int, str]]) -> str:
    frames = [traceback.FrameSummary(file, line, name) for file, line, name in calls]
    return "".join(traceback.format_list(frames)) if frames else "(no stack)"


def _last_words(entry: Entry) -> None:
    log.critical(
        "the lease of %s has run out under job %s (%s), which cannot be stopped: ending the process",
        *(entry.origin.name, entry.id, entry.type),
    )
    for handler in logging.getLogger().handlers:
        handler.flush()
