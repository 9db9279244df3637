"""One process of the system: ``python -m examples.tenants.serve``, with the settings from the environment.

``TENANTS_PARTS=all`` runs API and processor in one process, ``api`` and ``processor`` run one of them; start as many as
you like.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from importlib.resources import files

import asyncpg
import uvicorn
from fastapi import FastAPI
from sidings import Service

from . import tenants, users
from .payment import Payment
from .processor import process_tenants
from .requests import EXCEPTIONS, Requests
from .settings import Settings

__all__ = ["run", "system"]


def make_api(service: Service, settings: Settings) -> tuple[FastAPI, Requests]:
    """The HTTP API over a service. A new vertical adds its routes here."""
    requests = Requests(service, settings.acknowledge_seconds)
    app = FastAPI(title="Tenants", version="1")
    for error, handler in EXCEPTIONS.items():
        app.add_exception_handler(error, handler)
    app.include_router(tenants.routes(requests, settings.topics))
    app.include_router(users.routes(requests, settings.topics))
    tenants.follow_status(service, settings.topics)
    return app, requests


def declare_processors(service: Service, settings: Settings, payment: Payment) -> None:
    """All processors. A new vertical adds its own here."""
    process_tenants(service, settings.topics, payment)
    users.count_seats(service, settings.topics)


@asynccontextmanager
async def system(settings: Settings) -> AsyncGenerator[FastAPI | None]:
    """The parts that the settings name, running; gives the API, if it is one of them."""
    async with AsyncExitStack() as stack:
        app = None
        if settings.parts in ("all", "processor"):
            service = settings.service("processor")
            payment = Payment(settings.payment, settings.payment_seconds)
            stack.push_async_callback(payment.close)
            declare_processors(service, settings, payment)
            await _tables(service, settings, "processor.sql")
            await stack.enter_async_context(service)
        if settings.parts in ("all", "api"):
            service = settings.service("api")
            app, requests = make_api(service, settings)
            await _tables(service, settings, "api.sql")
            await stack.enter_async_context(service)
            sweeping = asyncio.create_task(requests.sweep())
            stack.callback(sweeping.cancel)
        yield app


async def _tables(service: Service, settings: Settings, name: str) -> None:
    await service.migrate()
    connection = await asyncpg.connect(settings.postgres)
    try:
        async with connection.transaction():  # processes that start together take turns
            await connection.execute("SELECT pg_advisory_xact_lock(hashtext('examples.tenants'))")
            await connection.execute(files(__package__ or "").joinpath(name).read_text())
    finally:
        await connection.close()


class _Server(uvicorn.Server):
    """Leaves the signals to `run`, so that the services are stopped in order as well."""

    @contextmanager
    def capture_signals(self):
        yield


async def run(settings: Settings, ready: Callable[[str], None]) -> None:
    """Run until SIGTERM or SIGINT. ready: is called with the API's URL, or with "processor"."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with system(settings) as app:
        if app is None:
            ready("processor")
            await stop.wait()
            return
        with socket.create_server((settings.host, settings.port), backlog=1024) as listening:
            server = _Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            ready(f"http://{settings.host}:{listening.getsockname()[1]}")
            try:
                stopped = asyncio.create_task(stop.wait())
                await asyncio.wait([serving, stopped], return_when=asyncio.FIRST_COMPLETED)
            finally:
                server.should_exit = True
                await serving


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(process)d %(name)s %(levelname)s %(message)s")
    asyncio.run(run(Settings.model_validate({}), lambda text: print(text, flush=True)))
