"""Host names, looked up whatever handlers keep busy."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

__all__ = ["look_up_apart"]

_AT_ONCE = 8


def look_up_apart() -> None:
    """Let the running event loop look up host names in threads of their own, for the rest of its life.

    It does that in those of `asyncio.to_thread`, a few more than there are CPUs. While handlers keep these, as long as
    calls hang, nothing could connect: an executor that had lost its connections went on to hold its origins, whose
    leases are renewed in another thread, and ran none of their jobs; a consumer did not reach its brokers any more.
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, asyncio.BaseEventLoop) and "getaddrinfo" not in vars(loop):  # others have threads of their own
        pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="sidings lookup")

        async def getaddrinfo(host: Any, port: Any, **options: int) -> list[Any]:
            return await loop.run_in_executor(pool, partial(socket.getaddrinfo, host, port, **options))

        loop.getaddrinfo = getaddrinfo
