"""Runs the jobs of the origins that this process holds.

Reading order:

* which job next, pure: `queues`, `suspects` (one at a time), `ready` (in which order), `memory` (how many), `scheduler`
* how jobs are found: `marks`, `planning`, `delivery` and `reader` with ``read.sql``; `glance` (at whether there is
  anything)
* how they start and end: `flights`, `cycles` and `recording` with ``cycle.sql``, `expected` (those that are named
  before they are read); `deferral` and `standing` (what a cycle cannot record, and why one is void)
* handlers: `worker`, `shares` and `slow_types` (who may have how many), `workers`, `calling` (one call, and what goes
  around it), `threads` (of plain functions), `forks`, `outages` (which are no failures), `attempts`; `transactional`
  and `spare` (those that commit with the end of their job)
* loops beside: `promoter`, `periodic`, `notify`, `upkeep`
* ownership: `reconcile` with the SQL function ``acquire``; `leases` and `watchdog` (threads), and their `clock`
* what all of these take: `settings`, `link` (a connection), `metrics`
* `health` is what they tell of themselves, and `executor` puts them together
"""

from .clock import now
from .executor import Executor
from .forks import end_if_forked, forks_so_far, keep_from_children
from .leases import LeaseEvents, LeaseThread
from .link import (
    BROKEN,
    MOST_IDLE_SECONDS,
    NOT_NOW,
    Backoff,
    Link,
    check_schema,
    close_all,
    connect,
    refuses_writes,
    rest_after,
    takes_no_writes,
)
from .marks import ReadMarks
from .metrics import ExecutorMetrics
from .outages import MOST_CONFLICTS, MOST_CUTS, after_conflict
from .settings import ExecutorSettings, PostgresSettings
from .transactional import CLEAN

__all__ = [
    "BROKEN",
    "CLEAN",
    "MOST_CONFLICTS",
    "MOST_CUTS",
    "MOST_IDLE_SECONDS",
    "NOT_NOW",
    "Backoff",
    "Executor",
    "ExecutorMetrics",
    "ExecutorSettings",
    "LeaseEvents",
    "LeaseThread",
    "Link",
    "PostgresSettings",
    "ReadMarks",
    "after_conflict",
    "check_schema",
    "close_all",
    "connect",
    "end_if_forked",
    "forks_so_far",
    "keep_from_children",
    "now",
    "refuses_writes",
    "rest_after",
    "takes_no_writes",
]
