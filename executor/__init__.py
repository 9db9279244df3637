"""Runs the jobs of the origins that this process holds.

Reading order: `queues` and `scheduler` (which job next; pure), `marks`, `planning`, `delivery` and `reader` with
`read.sql` (how jobs are found), `flights`, `cycles` and `recording` with `cycle.sql` (how they start and end),
`deferral` and `standing` (what a cycle cannot record, and why one is void), `workers` and `attempts` (handlers),
`transactional` and `spare` (those that commit with the end of their job), `promoter`, `periodic`, `notify` and `upkeep`
(loops beside), `reconcile` with the SQL function ``acquire`` (ownership), `leases` and `watchdog` (threads), `health`
(what all of these tell of themselves), then `executor`, which puts them together.
"""

from .clock import now
from .executor import Executor
from .forks import end_if_forked, forks_so_far, keep_from_children
from .leases import Leased, LeaseEvents, LeaseThread
from .link import NOT_NOW, Backoff, Link, check_schema, close_all, connect, disk_is_full, rest_after, takes_no_writes
from .marks import ReadMarks
from .metrics import ExecutorMetrics
from .outages import MOST_CONFLICTS, after_conflict
from .settings import ExecutorSettings, PostgresSettings
from .transactional import CLEAN

__all__ = [
    "CLEAN",
    "MOST_CONFLICTS",
    "NOT_NOW",
    "Backoff",
    "Executor",
    "ExecutorMetrics",
    "ExecutorSettings",
    "LeaseEvents",
    "LeaseThread",
    "Leased",
    "Link",
    "PostgresSettings",
    "ReadMarks",
    "after_conflict",
    "check_schema",
    "close_all",
    "connect",
    "disk_is_full",
    "end_if_forked",
    "forks_so_far",
    "keep_from_children",
    "now",
    "rest_after",
    "takes_no_writes",
]
