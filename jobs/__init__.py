"""What a job is, and how it gets into the database in the caller's transaction.

Reading order: `job` (what a handler sees), `outcome` (how an attempt ends), `retry` (what a failure leads to),
`registry` (declaring a type), `enqueue` and its SQL files (what is stored), `connections` (through what),
`transaction`.
"""

from .job import Fence, Job, JobId
from .outcome import SUCCEEDED, Again, Committed, End, ErrorInfo, Hold, Outcome, OutcomeName
from .registry import JobType, Policy, Registry
from .retry import Discard, Retry, RetryAfter, Snooze
from .transaction import Connection, Transaction, current_origin

__all__ = [
    "SUCCEEDED",
    "Again",
    "Committed",
    "Connection",
    "Discard",
    "End",
    "ErrorInfo",
    "Fence",
    "Hold",
    "Job",
    "JobId",
    "JobType",
    "Outcome",
    "OutcomeName",
    "Policy",
    "Registry",
    "Retry",
    "RetryAfter",
    "Snooze",
    "Transaction",
    "current_origin",
]
