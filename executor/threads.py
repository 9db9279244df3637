"""Handlers that are plain functions: each call runs in a thread, side by side with the event loop."""

import asyncio
import inspect
import logging
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, cast

from ..jobs import Snooze
from .forks import end_if_forked, forks_so_far
from .worker import Worker

__all__ = ["HandlerThreads"]

log = logging.getLogger("sidings.executor")

_NO_THREAD_SECONDS = 1.0  # until a plain function is tried again for which there was no thread


class HandlerThreads:
    """As many threads as there are workers, begun when they are needed. Once it is `stopping`, a cancelled call is
    waited for no longer."""

    def __init__(self, most: int) -> None:
        self.stopping = False
        self._most = most
        self._pool: ThreadPoolExecutor | None = None

    async def call(self, worker: Worker, name: str, handler: Callable[[Any], object], argument: Any) -> object:
        """Call a plain function. It cannot be interrupted: cancellation waits for it, and its own end counts; but a
        coroutine that it returns then has not begun, and does not any more. Raises what it raises, and that
        cancellation; `Snooze` where the process gets no thread for it."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._most, thread_name_prefix="sidings-job")
        worker.call = call = Future[object]()
        try:
            self._pool.submit(copy_context().run, _run, call, handler, argument)
        except RuntimeError as error:  # no more threads for this process; but the pool keeps the call, for one it has
            if call.cancel():
                log.warning("%s does not start yet, there is no thread for it: %s", name, error)
                raise Snooze(_NO_THREAD_SECONDS, f"no thread for it: {error}") from error
        ended, cancelled = await self._ended(call, name)
        result = ended.result()
        if inspect.isawaitable(result):  # of an `async def` behind a plain wrapper: what runs now is no thread
            if worker.call is call:  # else its middleware has given this up, and the worker has another job
                worker.call = None
            if cancelled is not None and isinstance(result, Coroutine):  # a future's work has begun, and is waited for
                result.close()
                raise cancelled  # by which anyio knows its own
        return result

    async def returned(self, worker: Worker, name: str) -> None:
        """Return when no plain function of this worker runs any more, whoever was to wait for it. Raises
        `CancelledError` where one is left to itself."""
        if worker.call is None or worker.call.done():
            return
        if self.stopping:
            raise asyncio.CancelledError
        call, _ = await self._ended(worker.call, name)
        call.exception()  # what it raised has been given to whoever called it

    async def _ended(
        self, call: Future[object], name: str
    ) -> tuple[asyncio.Future[object], asyncio.CancelledError | None]:
        """Wait for it to end, whoever cancels that; at a stop no longer. And how somebody has cancelled it first."""
        ended, cancelled = asyncio.wrap_future(call), None
        while not ended.done():
            try:
                await asyncio.wait([ended])
            except asyncio.CancelledError as error:
                if self.stopping:
                    raise
                if cancelled is None:  # a scope of anyio's cancels at each turn of the loop
                    log.warning("%s: a plain function cannot be cancelled; waiting for it", name)
                    cancelled = error
        return ended, cancelled

    def stop(self) -> None:
        """Begin nothing more. Threads that run are left to themselves."""
        self.stopping = True
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _run(call: Future[object], handler: Callable[[Any], object], argument: Any) -> None:
    """Call a plain function, unless the call has been withdrawn; what comes of it goes into `call`."""
    if not call.set_running_or_notify_cancel():
        return
    forks = forks_so_far()
    try:
        result = handler(argument)
        end_if_forked(forks)
        call.set_result(result)
    except (StopIteration, KeyboardInterrupt, SystemExit) as error:  # no future can carry them as what they are
        end_if_forked(forks, error)
        raised = RuntimeError(f"the handler raised {error!r}")
        raised.__cause__ = error
        call.set_exception(raised)
    except BaseException as error:  # noqa: BLE001 - whatever a handler raises is recorded
        end_if_forked(forks, error)
        call.set_exception(error)
    finally:
        _close_old_connections()
        del call, argument  # an error's traceback leads here


def _close_old_connections() -> None:
    """Django has a connection for each thread, and looks where a request ends whether it still works, and whether it is
    to stay open. In here no request ends: one that breaks would fail each job of its thread until the process ends."""
    django, conf = (cast(Any, sys.modules.get(name)) for name in ("django.db", "django.conf"))
    if django is None or conf is None:
        return
    try:
        if conf.settings.configured:
            django.close_old_connections()
    except Exception:  # it is no failure of the job
        log.exception("Django's connections could not be closed")
