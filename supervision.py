"""Watches the parts of a service: when one of them ends although nobody asked it to, all end, loudly and in order."""

import asyncio
import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, NoReturn, Self, cast

__all__ = ["Supervisor", "only_error", "raise_only"]

log = logging.getLogger("sidings.service")

_END_SECONDS = 5.0  # for parts that have been told to end


class Supervisor:
    """``async with Supervisor() as supervisor``: the unexpected end of a part cancels the block, which stops the other
    parts in its own order, and comes out of it as what ended the part. Where the task that has entered it has ended, as
    a cell of a notebook, nothing can be cancelled: `failures` are told of until somebody leaves the block."""

    def __init__(self) -> None:
        self.stopping = False  # from now on parts may end
        self.failures: list[str] = []
        self._group = asyncio.TaskGroup()
        self._failure: asyncio.Future[None] | None = None
        self._failed: Exception | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._watching: dict[asyncio.Task[None], str] = {}  # what each of them watches

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._failure = asyncio.get_running_loop().create_future()
        self._watcher = self._group.create_task(self._watch_failure(), name="sidings failure")
        if self._failed is not None:
            self.fail(self._failed)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._watcher is not None
        self._watcher.cancel()
        abandoning = asyncio.get_running_loop().call_later(_END_SECONDS, self._abandon)
        try:
            await self._group.__aexit__(kind, error, traceback)
        except BaseException as raised:
            # Raised once more in an exit stack, an error that has come after another would become its own context, and
            # the next stack around it would go through these for ever.
            if raised is not error:
                raise
        finally:
            abandoning.cancel()

    def watch(self, what: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a part. Whoever stops the service ends it; it is not cancelled because another part has failed."""
        part = asyncio.create_task(work, name=f"sidings: {what}")
        watching = self._group.create_task(self._watch_part(what, part), name=f"sidings: watching {what}")
        self._watching[watching] = what
        watching.add_done_callback(self._watching.pop)
        return part

    def fail(self, error: Exception) -> None:
        """End the service with `error`, at its start if it does not run yet."""
        self._failed = error
        self.failures.append(f"the service has failed and has to be ended: {error}")
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _watch_part(self, what: str, part: asyncio.Task[None]) -> None:
        await asyncio.wait([part])
        if self.stopping:
            return
        log.critical("%s has ended unexpectedly; the service stops", what)
        error = None if part.cancelled() else part.exception()
        self.failures.append(f"{what} has ended unexpectedly, and the service has to be ended")
        raise error or RuntimeError(f"{what} has ended although nobody asked it to")

    def _abandon(self) -> None:
        """Wait no longer for parts that do not end, as where a handler takes no notice of its cancellation."""
        for watching, what in self._watching.items():
            log.error("%s has not ended: the service stops without it", what)
            watching.cancel()

    async def _watch_failure(self) -> None:
        assert self._failure is not None
        await self._failure


def only_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The only exception of the group, or the group: one cause is raised as itself."""
    error, *others = list(group.exceptions)
    if others:
        return group
    return (
        only_error(cast(BaseExceptionGroup[BaseException], error)) if isinstance(error, BaseExceptionGroup) else error
    )


def raise_only(group: BaseExceptionGroup[BaseException]) -> NoReturn:
    """Raise the only exception of the group, or the group, which is handled now. What has caused it stays with it:
    `from None` would hide that, as it stands in the same object."""
    error = only_error(group)
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
        del error, group  # its traceback leads here
