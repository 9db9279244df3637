"""`sidings web`: the pages, for a browser on this machine."""

import ipaddress
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigurationError
from .command import command
from .output import note
from .session import open_session

if TYPE_CHECKING:
    from ..executor import PostgresSettings

__all__ = ["add_to"]


def add_to(app: typer.Typer) -> None:
    """Declare it."""
    command(app, "web", connects=False)(web)


async def web(
    settings: "PostgresSettings",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65_535, help="0: a free one.")] = 8400,
    host: Annotated[
        str, typer.Option("--host", help="Where to listen. Whoever can reach it reads all, payloads too.")
    ] = "127.0.0.1",
) -> None:
    """The same in a browser: status, jobs, groups, origins, outbox, audit. It only looks. Until Ctrl-C."""
    try:
        import uvicorn
        from starlette.middleware.trustedhost import TrustedHostMiddleware

        from .pages import pages
    except ModuleNotFoundError as error:
        if error.name not in ("jinja2", "starlette", "uvicorn"):
            raise
        raise ConfigurationError(f"the pages need {error.name}: pip install 'sidings[web]'") from None
    async with open_session(settings) as session:  # what is wrong is said now, not on each page
        where = session.where
    listening = _listen(host, port)
    address = listening.getsockname()
    named = f"[{address[0]}]" if ":" in address[0] else address[0]
    typer.echo(f"http://{named}:{address[1]} shows {where}; Ctrl-C ends it")
    application = pages(settings)
    if _is_loopback(address[0]):  # a site of somebody else's, whose name leads here, must not read along
        # "[": what older releases of Starlette take for the host of [::1]:8400. No site's name begins so.
        names = ["localhost", named, *(["["] if named.startswith("[") else [])]
        application.add_middleware(TrustedHostMiddleware, allowed_hosts=names)
    else:
        note("there is no login: whoever can reach this address reads everything, payloads too")
    config = uvicorn.Config(application, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    await uvicorn.Server(config).serve(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        raise ConfigurationError(f"--host {host} --port {port}: cannot listen there: {error}") from error
    return listening


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
