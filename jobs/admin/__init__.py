"""What a person may do to jobs while executors run: look, cancel, retry, release, requeue, pause, move; and
pausing what is read of a topic.

Reading order: `rows` (what is shown), `reading` (out of what), `admin` (the interface), `listing` (pages of jobs),
`many` (what is done to many jobs), `calls` (errors).

The actions themselves are SQL functions, in `schema/migrations/0048_administration.sql`; some are
written out once more in `0055_what_has_ended.sql`, `0060_actions.sql`, `0062_newest_versions.sql`,
`0063_delivered_again.sql`, `0064_where_it_belongs.sql`, `0067_followed.sql` and `0068_requeued.sql`; those of topics
are in `0066_paused_topics.sql`. See docs/administration.md.
"""

from .admin import Admin
from .rows import (
    ActedOn,
    AttemptRow,
    AuditRow,
    BlockedGroup,
    ExecutorRow,
    JobCount,
    JobDetails,
    JobRow,
    JobState,
    OriginRow,
    Orphan,
    PauseRow,
)

__all__ = [
    "ActedOn",
    "Admin",
    "AttemptRow",
    "AuditRow",
    "BlockedGroup",
    "ExecutorRow",
    "JobCount",
    "JobDetails",
    "JobRow",
    "JobState",
    "OriginRow",
    "Orphan",
    "PauseRow",
]
