"""How an executor of the lease model looks why its fence has grown, or why a cycle was void: `standing.sql`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lease_admin import learns, view_of
from lease_server import drop
from lease_state import Executor, Look, State, Statement, with_executor

if TYPE_CHECKING:
    from lease import Lease

__all__ = ["asks", "keep_its_own", "look_now", "looks_up"]

Steps = Iterator[tuple[str, State]]


def look_now(m: "Lease", s: State, i: int) -> Look:
    """A look that takes no time."""
    return Look(_epochs(s.executors[i]), view_of(m, s, i))


def _epochs(e: Executor) -> tuple[int | None, ...]:
    return tuple(hold and hold.epoch for hold in e.holds)


def asks(m: "Lease", s: State, i: int) -> tuple[str, State]:
    """A look that takes time."""
    e = s.executors[i]
    asking = e._replace(view=Look(_epochs(e), None), look=e.look and m.protocol.look_up == "once")
    return f"{m.names(i)} sends a look at its row", with_executor(s, i, asking, Statement(i, "look"))


def looks_up(m: "Lease", s: State, i: int) -> Steps:
    """The fence has grown while no cycle was under way: why?"""
    e, name = s.executors[i], m.names(i)
    if e.flights:
        return
    if e.view is not None:
        if e.view.view is not None:
            seen = e._replace(view=None, look=e.look and m.protocol.look_up != "once")
            yield f"{name} hears what its look has found", with_executor(s, i, _learned(m, seen, e.view))
    elif e.look and m.scenario.slow:
        yield asks(m, s, i)
    elif e.look:
        seen = _learned(m, e._replace(look=False), look_now(m, s, i))
        yield f"{name} looks why the fence has grown", with_executor(s, i, seen)


def _learned(m: "Lease", e: Executor, look: Look) -> Executor:
    assert look.view is not None
    return learns(m, keep_its_own(m, e, look), look)._replace(fence=look.view.fence)


def keep_its_own(m: "Lease", e: Executor, look: Look) -> Executor:
    """Give up all that the database does not say is held by this executor under this epoch. Not what has been acquired
    since the look was sent: that may be younger than the answer."""
    assert look.view is not None
    for origin, hold in enumerate(e.holds):
        if hold is not None and look.before[origin] == hold.epoch != look.view.epochs[origin]:
            e = drop(m, e, origin)
    return e
