"""For the tests of a service: run the jobs that a test has enqueued, let time pass, look at what was enqueued.

`drain` runs jobs in the test's own process with the code of the executor and of its workers, one job after the other:
no polling, nothing that goes on behind the test's back. See docs/testing.md.
"""

from .drain import Attempt, NotDrained, drain
from .look import advance, enqueued

__all__ = ["Attempt", "NotDrained", "advance", "drain", "enqueued"]
