"""Python's cyclic collector rests while directories are loaded."""

import gc
import time

__all__ = ["Collector"]

_IDLE_SECONDS = 1.0  # a load that waits for so long is no reason any more
_MANY = 200_000  # new objects: to look through them takes some 0.1 s


class Collector:
    """A load makes hundreds of thousands of objects, all of which stay and none of which are in cycles. Looking through
    them again and again takes a third of the load's CPU. It goes on when the last of the process' loads has ended.
    Where they are many, it looks through them then: else it would do so thrice in the next minutes, while the service
    works, which stands still meanwhile. Switched off by somebody else, it stays off."""

    _rests = 0  # loads, in this process

    def __init__(self) -> None:
        self._resting = False
        self._busy_at = 0.0

    def rest(self) -> None:
        """Look for no cycles until `resume`."""
        self._busy_at = time.monotonic()
        if not self._resting and (Collector._rests or gc.isenabled()):
            gc.disable()
            Collector._rests += 1
            self._resting = True

    def resume(self, *, if_idle: bool = False) -> None:
        """Go on, if `rest` has had an effect; with `if_idle` only where it was called for the last time a second ago.
        Safe to call twice."""
        if self._resting and not (if_idle and time.monotonic() - self._busy_at < _IDLE_SECONDS):
            self._resting = False
            Collector._rests -= 1
            if not Collector._rests:
                gc.enable()
                if gc.get_count()[0] > _MANY:
                    gc.collect()
