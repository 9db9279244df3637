"""Memory of the process that asks. It imports next to nothing, because that would count as well."""

import sys
from pathlib import Path

__all__ = ["peak_mib"]

_STATUS = Path("/proc/self/status")


def peak_mib() -> float:
    """The most that this process has had resident, in MiB.

    On Linux that is not what `getrusage()` tells: its figure begins with the peak of the process that started this one.
    """
    if _STATUS.exists():
        [line] = [line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) / 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 1024)  # bytes on macOS, KiB elsewhere
