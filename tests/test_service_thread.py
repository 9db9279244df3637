"""A service whose event loop runs in a thread that is not the main one."""

import asyncio
import threading

from sidings import StaticAssignment

from .consumer_support import a_service
from .support import ORIGIN, SECONDS, eventually


async def test_a_service_is_stopped_from_another_thread(database: str):
    service = a_service(database, assignment=StaticAssignment([ORIGIN]))
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            asyncio.run(service.run(), debug=True)  # which complains where another thread touches the loop
            ended.append(None)
        except BaseException as error:  # told in the test's own thread
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    await eventually(lambda: ORIGIN in service.executor.held, "the service to run")
    service.stop()
    await asyncio.to_thread(thread.join, SECONDS)
    assert ended == [None]
