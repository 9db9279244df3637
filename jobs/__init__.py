"""What a job is, and how it gets into the database in the caller's transaction.

Reading order: `job` (what a handler sees), `outcome` (how an attempt ends), `retry` (what a failure leads to),
`job_type` (what a type is), `doubts` (of which types JSON may make other values), `registry` (declaring one),
`periodic` (schedules), `enqueue` and its SQL files (what is stored), `connections` (through what), `transaction`;
`context` (what travels along), `middleware` and `tracing` (what goes around handlers).
"""

from .context import LogContext, correlated, current_headers
from .job import Fence, Job, JobId
from .job_type import JobType, Policy
from .middleware import Call, Middleware, Next
from .outcome import SUCCEEDED, Again, Committed, End, ErrorInfo, Hold, Outcome, OutcomeName
from .periodic import Periodic, Tick, Upcoming, upcoming
from .registry import Registry
from .retry import Discard, Retry, RetryAfter, Snooze
from .transaction import Connection, Transaction

__all__ = [
    "SUCCEEDED",
    "Again",
    "Call",
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
    "LogContext",
    "Middleware",
    "Next",
    "Outcome",
    "OutcomeName",
    "Periodic",
    "Policy",
    "Registry",
    "Retry",
    "RetryAfter",
    "Snooze",
    "Tick",
    "Transaction",
    "Upcoming",
    "correlated",
    "current_headers",
    "upcoming",
]
