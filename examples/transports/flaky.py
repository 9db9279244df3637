"""The carrier's API, which takes ETAs over HTTP: quick and reliable for most transports, not for all.

While the faults are on, every 25th transport's calls fail (503) and every 100th's hang. The demo switches them with
``PUT /faults``. Runs as a process of its own: ``python -m examples.transports.flaky``.
"""

import asyncio
import contextlib
import random
from enum import Enum

from aiohttp import web

from .children import unless_orphaned

__all__ = ["Fault", "fault_of"]

HANG_SECONDS = 120.0


class Fault(Enum):
    """How the carrier treats a transport while the faults are on."""

    NONE = "answers in a few milliseconds"
    ERROR = "answers 503"
    HANG = "does not answer"


def fault_of(transport_id: str) -> Fault:
    """A function of the name: of 100 transports four get errors and one hangs."""
    number = int(transport_id.rpartition("-")[2])
    if number % 25 == 7:
        return Fault.ERROR
    return Fault.HANG if number % 100 == 13 else Fault.NONE


class FlakyCarrier:
    """The server."""

    def __init__(self) -> None:
        self._faulty = asyncio.Event()
        self._cured = asyncio.Event()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/transports/{id}/eta", self._eta)
        app.router.add_put("/faults/{state}", self._faults)
        return app

    async def _eta(self, request: web.Request) -> web.Response:
        await request.read()
        if self._faulty.is_set():
            match fault_of(request.match_info["id"]):
                case Fault.ERROR:
                    return web.Response(status=503, text="the carrier's system is down")
                case Fault.HANG:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(HANG_SECONDS):
                            await self._cured.wait()
                case Fault.NONE:
                    pass
        await asyncio.sleep(random.uniform(0.001, 0.006))
        return web.Response(status=204)

    async def _faults(self, request: web.Request) -> web.Response:
        if request.match_info["state"] == "on":
            self._faulty.set()
            self._cured.clear()
        else:
            self._faulty.clear()
            self._cured.set()
        return web.Response(status=204)


async def main() -> None:
    """Serve until cancelled; the first line of output says where."""
    runner = web.AppRunner(FlakyCarrier().app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    print(f"http://{host}:{port}", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(unless_orphaned(main()))
