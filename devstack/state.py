"""What is remembered about a server between processes, and how its state is told."""

import json
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from .errors import ServerStateError
from .process import ServerProcess

__all__ = ["SavedState", "ServerState", "ServerStatus", "describe"]


class SavedState:
    """Texts under names in a JSON file that only its owner can read (it holds generated passwords)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _read(self) -> dict[str, str]:
        try:
            return json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:  # as after a power failure
            raise ServerStateError(
                f"{self._path} is empty or damaged, and the server's address and password with it: delete the server, "
                "by `python -m sidings.devstack down --delete` or its remove()"
            ) from error

    def __contains__(self, name: str) -> bool:
        return name in self._read()

    def __getitem__(self, name: str) -> str:
        """Raises ServerStateError when the server was never started, or the file is damaged."""
        try:
            return self._read()[name]
        except KeyError:
            raise ServerStateError(f"{self._path.parent} holds no server yet: start it first") from None

    def update(self, **values: str) -> None:
        partial = self._path.with_suffix(".new")
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(self._read() | values, file)
        partial.replace(self._path)


class ServerState(StrEnum):
    """State of a server's process."""

    ABSENT = "absent"  # never started here
    STOPPED = "stopped"
    RUNNING = "running"
    PAUSED = "paused"  # by SIGSTOP


@dataclass(frozen=True)
class ServerStatus:
    """One line of `status`: a server, its state, and where it is."""

    name: str
    state: ServerState
    pid: int | None
    address: str | None
    log: Path


def describe(process: ServerProcess, address: str | None) -> ServerStatus:
    """The status of `process`."""
    found = process.find()
    if found is None:
        state = ServerState.ABSENT if address is None else ServerState.STOPPED
    else:
        state = ServerState.PAUSED if process.paused else ServerState.RUNNING
    return ServerStatus(process.name, state, found.pid if found else None, address, process.log)
