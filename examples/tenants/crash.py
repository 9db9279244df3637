"""Moments at which a process may die. The tests make it die there: they write the name of one into the file that
``TENANTS_CRASH_FILE`` names, and the first process that comes by ends itself by SIGKILL."""

import os
import signal
from pathlib import Path

__all__ = ["crash_point"]

_FILE = os.environ.get("TENANTS_CRASH_FILE")


def crash_point(name: str) -> None:
    """Die here, once, if the file says so."""
    if _FILE is None:
        return
    path = Path(_FILE)
    try:
        if path.read_text() != name:
            return
        path.unlink()  # of several processes one dies
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
