"""What can go wrong with the devstack.

DevstackError
├── ToolMissingError     a program or package that a server needs is not there: install what the text names
├── ServerStartError     a server died or did not answer in time: read the log lines in the text
└── ServerStateError     the request does not fit the server's state (e.g. pausing one that is stopped)
"""

from collections.abc import Sequence
from pathlib import Path

from ..errors import SidingsError

__all__ = ["DevstackError", "ServerStartError", "ServerStateError", "ToolMissingError"]


class DevstackError(SidingsError):
    """Root of the devstack's errors."""


class ToolMissingError(DevstackError):
    """A program or package is missing; the text says which one and how to get it."""


class ServerStateError(DevstackError):
    """The server is not in a state that allows the request."""


class ServerStartError(DevstackError):
    """A server did not come up. The text carries the last lines of its log."""

    def __init__(self, server: str, reason: str, log: Path, lines: Sequence[str]) -> None:
        self.server = server
        self.log = log
        self.lines = tuple(lines)
        shown = "\n".join(f"    {line}" for line in lines) or "    (the log is empty)"
        super().__init__(f"{server} did not start: {reason}. The last lines of {log}:\n{shown}")
