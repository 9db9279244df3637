"""SIGTERM and SIGINT, which stop the services of a process, and none of a process that is forked from it."""

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

__all__ = ["stop_signals"]

log = logging.getLogger("sidings.service")

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_stopped_by_signals: list[Callable[[signal.Signals], None]] = []  # one for each service that runs in the main thread
_had_before: dict[signal.Signals, Any] = {}  # the handlers of before the first of them; None: none of Python's


@contextmanager
def stop_signals(stop: Callable[[], None], hurry: Callable[[], None]) -> Generator[None]:
    """SIGTERM and SIGINT inside of the block: the first calls `stop`, each further one `hurry`; of all such blocks that
    run side by side. At the end of the last one, who had them before has them again, as a web server; and where it had
    SIGTERM, it gets what was caught. Processes that are forked inside of it get them as ever.

    Only in the main thread, which signals reach; whoever runs a loop elsewhere calls ``Service.stop``.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    caught: list[signal.Signals] = []

    def received(name: signal.Signals) -> None:
        log.warning("%s: %s", name.name, "cancelling what still runs" if caught else "stopping gracefully")
        (hurry if caught else stop)()
        caught.append(name)

    if not _stopped_by_signals:
        for name in _STOP_SIGNALS:
            if loop.remove_signal_handler(name):  # nobody can get hold of it to give it back
                log.warning("%s does not reach the event loop's own handler any more, since a service runs", name.name)
            _had_before[name] = signal.getsignal(name)
    _stopped_by_signals.append(received)
    for name in _STOP_SIGNALS:
        loop.add_signal_handler(name, _tell_all, name)
    try:
        yield
    finally:
        _stopped_by_signals.remove(received)
        if not _stopped_by_signals:
            for name in _STOP_SIGNALS:
                loop.remove_signal_handler(name)
                if (before := _had_before.pop(name)) is not None:
                    signal.signal(name, before)
            if caught and callable(signal.getsignal(signal.SIGTERM)):  # not of SIGINT, which asyncio.run has
                signal.raise_signal(caught[0])


def _tell_all(name: signal.Signals) -> None:
    for received in _stopped_by_signals.copy():
        received(name)


# A forked process has the event loop's signal handlers, which tell of a signal through a socket that it shares with its
# parent: SIGTERM for a child, as `multiprocessing.Pool` ends its own, stopped the service, and the child went on. None
# gets through before the child is rid of them.
_forking = threading.local()


def _before_fork() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    if _stopped_by_signals:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _stopped_by_signals.clear()  # a service of the child's own is its first
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
