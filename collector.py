"""How often Python's cyclic collector runs in a process that is a service's own."""

import gc

__all__ = ["relax_collector"]

_PYTHONS_OWN_THRESHOLDS = {(700, 10, 10), (2_000, 10, 0), (2_000, 10, 10)}
_THRESHOLDS = 50_000, 20, 100


def relax_collector() -> None:
    """Let Python's cyclic collector run more rarely, unless somebody has set its thresholds.

    At its defaults it takes 10 to 15 % of the CPU of a process that decodes some ten thousand rows a second, none of
    which are in cycles. What is there now, modules and models, is looked at no more (`gc.freeze`).
    """
    if gc.isenabled() and gc.get_threshold() in _PYTHONS_OWN_THRESHOLDS:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_THRESHOLDS)
