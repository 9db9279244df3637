"""A directory for the servers of one test session, and the removal of what killed sessions left behind."""

import logging
import os
import re
import secrets
import shutil
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from .kafka import Kafka
from .locations import home, locked
from .postgres import Postgres
from .process import birth

__all__ = ["session_directory", "sweep"]

OWNER = "owner"  # file: pid and birth of the process that runs the session
log = logging.getLogger(__name__)


@contextmanager
def session_directory() -> Generator[Path]:
    """A new directory under the devstack's home, deleted at the end. Sessions may begin and end at the same time, as
    the workers of one test run do."""
    sessions = home() / "sessions"
    sessions.mkdir(parents=True, exist_ok=True)
    with _alone(sessions):
        _sweep(sessions)
        directory = sessions / f"{os.getpid()}-{secrets.token_hex(3)}"
        directory.mkdir()
        partial = directory / f"{OWNER}.new"
        partial.write_text(f"{os.getpid()} {birth(os.getpid())}")
        partial.replace(directory / OWNER)
    try:
        yield directory
    finally:
        with _alone(sessions):
            _remove(directory)


def sweep(home: Path) -> None:
    """Kill the servers of killed test sessions under this home of a devstack, and delete their data."""
    sessions = home / "sessions"
    if sessions.is_dir():
        with _alone(sessions):
            _sweep(sessions)


def _alone(sessions: Path) -> AbstractContextManager[object]:
    # Else two would remove the same leftovers, or one would look into a directory that another is deleting.
    return locked(sessions.with_suffix(".lock"))


def _sweep(sessions: Path) -> None:
    """A session that was killed could not stop its servers: kill them now, and delete their data."""
    for directory in sessions.iterdir():
        ours = re.fullmatch(r"\d+-[0-9a-f]{6}", directory.name)  # nothing else here is touched
        if ours and directory.is_dir() and not _lives(directory):
            log.warning("removing the servers of a test session that was killed: %s", directory)
            _remove(directory)


def _lives(directory: Path) -> bool:
    try:
        pid, noted = (directory / OWNER).read_text().split(" ", 1)
        return birth(int(pid)) == noted
    except (FileNotFoundError, ValueError):  # killed, or the disk full, as it was written; nobody writes one now
        return False


def _remove(directory: Path) -> None:
    """The servers as well, and what the links lead to: in memory it would stay until the machine is restarted."""
    for server in directory.iterdir():
        if (server / "kafka.json").exists():
            Kafka(server).remove()
        elif server.is_dir():  # a Postgres, perhaps one whose session was killed while `initdb` was at work
            Postgres(server).remove()
    shutil.rmtree(directory, ignore_errors=True)
