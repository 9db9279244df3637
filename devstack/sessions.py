"""A directory for the servers of one test session, and the removal of what killed sessions left behind."""

import logging
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil

from .kafka import Kafka
from .locations import home
from .postgres import Postgres

__all__ = ["session_directory"]

log = logging.getLogger(__name__)


@contextmanager
def session_directory() -> Generator[Path]:
    """A new directory under the devstack's home, deleted at the end."""
    sessions = home() / "sessions"
    sessions.mkdir(parents=True, exist_ok=True)
    _sweep(sessions)
    owner = psutil.Process()
    directory = sessions / f"{owner.pid}-{owner.create_time():.2f}-{secrets.token_hex(3)}"
    directory.mkdir()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _sweep(sessions: Path) -> None:
    """A session that was killed could not stop its servers: kill them now, and delete their data."""
    for directory in sessions.iterdir():
        pid, started, _ = directory.name.split("-")
        if _runs(int(pid), float(started)):
            continue
        log.warning("removing the servers of a test session that was killed: %s", directory)
        for server in directory.iterdir():
            if (server / "postgres.json").exists():
                Postgres(server).remove()
            elif (server / "kafka.json").exists():
                Kafka(server).remove()
        shutil.rmtree(directory, ignore_errors=True)


def _runs(pid: int, started: float) -> bool:
    try:
        return abs(psutil.Process(pid).create_time() - started) < 0.05
    except psutil.NoSuchProcess:
        return False
