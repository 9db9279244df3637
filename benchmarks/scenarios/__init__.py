"""The scenarios, a module for each kind. Importing a module declares its scenarios."""

from .. import peers
from ..suite import SCENARIOS, Size
from . import cdc, consumer, directory, drain, enqueue, fleet, history, latency, outbox, trouble

__all__ = [
    "SCENARIOS",
    "Size",
    "cdc",
    "consumer",
    "directory",
    "drain",
    "enqueue",
    "fleet",
    "history",
    "latency",
    "outbox",
    "trouble",
    "without_peers",
]


def without_peers() -> None:
    """Run only ours and the floors."""
    peers.switched_off = True
