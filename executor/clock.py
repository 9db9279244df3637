"""The clock that leases are counted on: it goes on while the machine sleeps, and nobody can set it."""

import time
from functools import partial

__all__ = ["now"]

if hasattr(time, "CLOCK_BOOTTIME"):
    now = partial(time.clock_gettime, time.CLOCK_BOOTTIME)  # seconds since boot, time asleep included
else:  # macOS: CLOCK_MONOTONIC counts time asleep there
    now = time.monotonic
