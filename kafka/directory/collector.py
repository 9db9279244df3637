"""Python's cyclic collector rests while a directory is loaded."""

import gc

__all__ = ["Collector"]


class Collector:
    """A load makes hundreds of thousands of objects, all of which stay and none of which are in cycles. Looking through
    them again and again takes a third of the load's CPU. Switched off by somebody else, it stays off."""

    def __init__(self) -> None:
        self._resting = False

    def rest(self) -> None:
        """Look for no cycles until `resume`."""
        if gc.isenabled():
            gc.disable()
            self._resting = True

    def resume(self) -> None:
        """Go on, if `rest` has had an effect. Safe to call twice."""
        if self._resting:
            gc.enable()
            self._resting = False
