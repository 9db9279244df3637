"""How often Python's cyclic collector runs: in a process that is a service's own, and while directories are loaded."""

import gc
import time

__all__ = ["CollectorRest", "relax_collector"]

_PYTHONS_OWN_THRESHOLDS = {(700, 10, 10), (2_000, 10, 0), (2_000, 10, 10)}
_THRESHOLDS = 50_000, 20, 100

_IDLE_SECONDS = 1.0  # a load that waits for so long is no reason any more
_MANY = 200_000  # new objects: to look through them takes some 0.1 s


def relax_collector() -> None:
    """Let Python's cyclic collector run more rarely, unless somebody has set its thresholds.

    At its defaults it takes 10 to 15 % of the CPU of a process that decodes some ten thousand rows a second, none of
    which are in cycles. What is there now, modules and models, is looked at no more (`gc.freeze`).
    """
    if gc.isenabled() and gc.get_threshold() in _PYTHONS_OWN_THRESHOLDS:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_THRESHOLDS)


class CollectorRest:
    """The collector rests while a directory is loaded, which makes hundreds of thousands of objects, all of which stay
    and none of which are in cycles: looking through them again and again takes a third of the load's CPU. It goes on
    when the last of the process' loads has ended. Where they are many, it looks through them then: else it would do so
    thrice in the next minutes, while the service works, which stands still meanwhile. Switched off by somebody else, it
    stays off."""

    _rests = 0  # loads, in this process

    def __init__(self) -> None:
        self._resting = False
        self._busy_at = 0.0

    def rest(self) -> None:
        """Look for no cycles until `resume`."""
        self._busy_at = time.monotonic()
        if not self._resting and (CollectorRest._rests or gc.isenabled()):
            gc.disable()
            CollectorRest._rests += 1
            self._resting = True

    def resume(self, *, if_idle: bool = False) -> None:
        """Go on, if `rest` has had an effect; with `if_idle` only where it was called for the last time a second ago.
        Safe to call twice."""
        if self._resting and not (if_idle and time.monotonic() - self._busy_at < _IDLE_SECONDS):
            self._resting = False
            CollectorRest._rests -= 1
            if not CollectorRest._rests:
                gc.enable()
                if gc.get_count()[0] > _MANY:
                    gc.collect()
