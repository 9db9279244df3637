"""Where the devstack keeps things, and which ports it takes."""

import fcntl
import os
import random
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .errors import DevstackError

__all__ = ["LOOPBACK", "cache_directory", "free_port", "free_ports", "home", "is_free", "locked"]

# Below the range that systems hand out to outgoing connections (32768 and up on Linux, 49152 on macOS). A
# port of that range could be taken by any client while its server is down; and a client that retries
# 127.0.0.1 on a closed port of that range can even connect to itself.
PORTS = range(12_000, 32_000)
LOOPBACK = "127.0.0.1"


def home() -> Path:
    """The devstack's own directory: `$SIDINGS_DEVSTACK_HOME`, else `.sidings-devstack` right here."""
    return Path(os.environ.get("SIDINGS_DEVSTACK_HOME") or ".sidings-devstack").expanduser().resolve()


def cache_directory() -> Path:
    """What is fetched once per user lives here: `$XDG_CACHE_HOME/sidings`, else `~/.cache/sidings`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sidings"


@contextmanager
def locked(path: Path) -> Generator[IO[str]]:
    """One process at a time: the others wait. Who inherits the open file has the lock, too."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def free_port() -> int:
    """A loopback TCP port that nothing listens on now.

    Raises:
        DevstackError: after 200 taken ports in a row.
    """
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """As many different ports that nothing listens on now."""
    free: list[int] = []
    for port in random.SystemRandom().sample(PORTS, 200 + count):
        if is_free(port):
            free.append(port)
        if len(free) == count:
            return free
    raise DevstackError(f"no free TCP port found between {PORTS.start} and {PORTS.stop}")


def is_free(port: int) -> bool:
    """Whether nothing listens on this loopback TCP port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
