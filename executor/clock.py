"""The clock that leases are counted on: it goes on while the machine sleeps, and nobody can set it."""

import time

__all__ = ["now"]

if hasattr(time, "CLOCK_BOOTTIME"):
    _BOOTTIME = time.CLOCK_BOOTTIME

    def now() -> float:
        """Seconds since boot, time asleep included."""
        return time.clock_gettime(_BOOTTIME)

else:  # macOS: CLOCK_MONOTONIC counts time asleep there
    now = time.monotonic
