"""The third party: a payment provider with an HTTP API, and with bad days. A process of its own:

    python -m examples.tenants.provider --port 8081 --journal provider.jsonl

What it has done stands in the journal before it answers, so it knows its idempotency keys after a crash as well.
`PUT /mode/{mode}?times=n` makes the next n registrations go wrong:

* ``slow``     done, but the answer is held back until the caller gives up
* ``fail``     not done: 503
* ``twice``    done, and answered twice: two whole HTTP answers to one request
* ``die``      done, answered, and the process is gone
* ``vanish``   done, and the process is gone without an answer

``late`` makes the next closings go wrong: 504, and it is done all the same, after the tenant's next registration.

`GET /journal` says what it has done. Whoever pays with ``declined`` is refused: 402.
"""

import argparse
import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from aiohttp import web

__all__ = ["Mode", "Provider", "serving"]

_HELD_BACK_SECONDS = 60.0


class Mode(StrEnum):
    """What goes wrong."""

    SLOW = "slow"
    FAIL = "fail"
    TWICE = "twice"
    DIE = "die"
    VANISH = "vanish"
    LATE = "late"


class Provider:
    """The server. journal: a file that is kept over a restart."""

    def __init__(self, journal: Path) -> None:
        self._file = journal.open("a+b")
        self._file.seek(0)
        self._journal: list[dict[str, Any]] = [json.loads(line) for line in self._file]
        self._answers = {entry["key"]: entry for entry in self._journal if "key" in entry}
        self._wrong: list[Mode] = []
        self._late: dict[str, str] = {}  # by tenant: the key of a closing that is still to be done

    def app(self) -> web.Application:
        """Its routes."""
        app = web.Application()
        app.router.add_post("/registrations", self._register)
        app.router.add_delete("/customers/{tenant}", self._close)
        app.router.add_put("/mode/{mode}", self._set_mode)
        app.router.add_get("/journal", self._show)
        return app

    async def _register(self, request: web.Request) -> web.StreamResponse:
        key, wanted = request.headers["Idempotency-Key"], await request.json()
        mode = self._wrong.pop(0) if self._wrong and self._wrong[0] is not Mode.LATE else None
        if mode is Mode.FAIL:
            return web.Response(status=503, text="the provider's system is down")
        entry = self._answers.get(key)
        if entry is None:
            declined = wanted["payment_method"] == "declined"
            said = (
                {"reason": "the payment method was declined"} if declined else {"customer": f"cus-{wanted['id'][:8]}"}
            )
            entry = self._answers[key] = {"what": "registered", "tenant": wanted["id"], "key": key, "said": said}
            self._write(entry)
            if late := self._late.pop(wanted["id"], None):
                self._close_once(wanted["id"], late)
        if mode is Mode.VANISH:
            os._exit(1)
        if mode is Mode.SLOW:
            await asyncio.sleep(_HELD_BACK_SECONDS)  # cancelled when the caller hangs up
        body = json.dumps({"key": key, **entry["said"]})
        answer = web.Response(
            status=402 if "reason" in entry["said"] else 201, text=body, content_type="application/json"
        )
        if mode is None:
            return answer
        await answer.prepare(request)
        await answer.write_eof()
        if mode is Mode.DIE:
            os._exit(1)
        assert request.transport is not None
        head = (
            f"HTTP/1.1 {answer.status} Again\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        request.transport.write(f"{head}{body}".encode())
        return answer

    async def _close(self, request: web.Request) -> web.Response:
        tenant, key = request.match_info["tenant"], request.headers["Idempotency-Key"]
        if Mode.LATE in self._wrong:
            self._wrong.remove(Mode.LATE)
            self._late[tenant] = key
            self._write({"what": "held back", "tenant": tenant})
            return web.Response(status=504, text="the provider's system is slow")
        self._close_once(tenant, key)
        return web.Response(status=204)

    def _close_once(self, tenant: str, key: str) -> None:
        known = key in self._answers
        entry = {"what": "closed before" if known else "closed", "tenant": tenant, "key": key}
        self._answers.setdefault(key, entry)
        self._write(entry)

    async def _set_mode(self, request: web.Request) -> web.Response:
        self._wrong = [Mode(request.match_info["mode"])] * int(request.query.get("times", "1"))
        return web.Response(status=204)

    async def _show(self, _: web.Request) -> web.Response:
        return web.json_response(self._journal)

    def _write(self, entry: dict[str, Any]) -> None:
        """On disk before anybody is told."""
        self._journal.append(entry)
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


@asynccontextmanager
async def serving(journal: Path, port: int = 0) -> AsyncGenerator[str]:
    """The provider on a port of this machine, 0 for a free one; gives its URL."""
    runner = web.AppRunner(Provider(journal).app(), access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _main(journal: Path, port: int) -> None:
    async with serving(journal, port) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Serve until SIGINT; the first line of output says where."""
    parser = argparse.ArgumentParser(prog="python -m examples.tenants.provider")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--journal", type=Path, required=True)
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(arguments.journal, arguments.port))


if __name__ == "__main__":
    main()
