"""What a job is, and how it gets into the database in the caller's transaction.

Reading order:

* a job: `job` (what a handler sees), `outcome` (how an attempt ends), `retry` (what a failure leads to)
* declaring one: `job_type` (what a type is), `groups` (in which group a job is), `handlers` (what a handler says of
  itself), `registry`, `periodic` (schedules)
* its payload: `payloads`; what JSON would make of it: `schemas` (of pydantic), `doubts` (of which types other values),
  `kinds` and `lossy` (which ones), `limits` (what is not read)
* storing it: `enqueue` and its SQL files, `connections` (through what), `transaction`; `addition` holds
  jobs back until its end; `withdraw` takes one back
* what goes around handlers: `context` (what travels along), `middleware`, `tracing`
* `admin` is what persons do to jobs
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
