"""What must be true at the end. Each check reads the database afresh, and says in words what is wrong."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg

__all__ = ["Check", "Story", "verify"]


@dataclass(frozen=True)
class Story:
    """What happened, as far as the checks need to know it.

    killed: the instance that got SIGKILL, its executor, and when it was dead by the server's clock.
    in_topic: messages that the topic holds, by Kafka's own count.
    """

    executors: Mapping[UUID, str]
    killed: str
    killed_executor: UUID
    killed_at: datetime
    in_topic: int


@dataclass(frozen=True)
class Check:
    """One line of the verdict; `problems` is empty when all is well."""

    claim: str
    figures: str
    problems: list[str]

    @property
    def passed(self) -> bool:
        return not self.problems


MESSAGES = """
WITH sent AS (SELECT transport_id, count(*) AS messages, max(sequence) AS last FROM produced GROUP BY transport_id)
SELECT coalesce(sum(s.messages), 0)::int AS produced,
       sum(t.messages_seen)::int AS applied,
       coalesce(sum(greatest(s.messages - t.messages_seen, 0)), 0)::int AS lost,
       sum(greatest(t.messages_seen - coalesce(s.messages, 0), 0))::int AS twice,
       count(*) FILTER (WHERE t.last_sequence <> coalesce(s.last, 0)) AS out_of_step
FROM transport t LEFT JOIN sent s ON s.transport_id = t.id
"""

JOBS = """
WITH known AS (   -- jobs that left any trace
    SELECT job_id FROM audit UNION SELECT job_id FROM sidings.job_history UNION SELECT id FROM sidings.job
), ended AS (
    SELECT k.job_id, count(h.job_id) AS endings
    FROM known k
    LEFT JOIN sidings.job_history h
        ON h.job_id = k.job_id AND h.outcome IN ('succeeded', 'discarded', 'followed', 'cancelled', 'superseded')
    GROUP BY k.job_id
), told AS (
    SELECT transport_id, sequence, count(DISTINCT job_id) AS jobs, bool_or(outcome = 'succeeded') AS arrived
    FROM audit GROUP BY transport_id, sequence
)
SELECT (SELECT count(*) FROM known) AS jobs,
       (SELECT count(*) FROM ended WHERE endings = 0) AS without_end,
       (SELECT count(*) FROM ended WHERE endings > 1) AS ended_twice,
       (SELECT count(*) FROM sidings.job) AS waiting,
       (SELECT count(*) FROM produced LEFT JOIN told USING (transport_id, sequence) WHERE arrived IS NOT TRUE)
           AS untold,
       (SELECT count(*) FROM told WHERE jobs > 1) AS doubled,
       (SELECT count(*) FROM sidings.job_history
        WHERE outcome IN ('discarded', 'followed', 'cancelled', 'superseded', 'held'))
           AS given_up
"""

# One row per run of a handler. A run of the killed instance that has no end ended with its process.
RUNS = """
WITH run AS (
    SELECT s.run, s.instance, s.job_id, s.attempt, s.transport_id, s.sequence, s.at AS started, e.outcome,
           coalesce(e.at, CASE WHEN s.instance = $1 THEN greatest($2, s.at) ELSE 'infinity' END) AS ended
    FROM audit s LEFT JOIN audit e ON e.run = s.run AND e.event = 'end'
    WHERE s.event = 'start'
)
"""

ORDER = (
    RUNS
    + """
, followed AS (
    SELECT *, max(sequence) OVER earlier AS furthest, max(ended) OVER earlier AS busy_until
    FROM run
    WINDOW earlier AS (PARTITION BY transport_id ORDER BY started, run ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
)
SELECT count(*) AS runs, count(DISTINCT transport_id) AS groups,
       count(*) FILTER (WHERE sequence < furthest) AS inversions,
       count(*) FILTER (WHERE started < busy_until) AS overlaps,
       min(transport_id) FILTER (WHERE sequence < furthest OR started < busy_until) AS example
FROM followed
"""
)

CHECK_SECONDS = 60.0

CUT = (
    RUNS
    + """
, lost AS (SELECT job_id, attempt, executor FROM sidings.job_history WHERE outcome = 'lost'
), done AS (SELECT job_id, attempt, executor FROM sidings.job_history WHERE outcome = 'succeeded')
SELECT (SELECT count(*) FROM lost) AS lost,
       (SELECT count(*) FROM lost WHERE executor <> $3) AS lost_by_others,
       (SELECT count(*) FROM run WHERE ended = 'infinity' OR outcome IS NULL) AS cut,
       (SELECT count(*) FROM run r WHERE outcome IS NULL
            AND NOT (r.instance = $1
                     AND EXISTS (SELECT FROM lost l WHERE l.job_id = r.job_id AND l.attempt = r.attempt)))
           AS cut_without_reason,
       (SELECT count(*) FROM run r JOIN lost l USING (job_id, attempt) WHERE r.outcome = 'succeeded') AS told_twice,
       (SELECT count(*) FROM (SELECT job_id FROM run WHERE outcome = 'succeeded' GROUP BY job_id
                              HAVING count(*) > 1) s) AS succeeded_again,
       (SELECT count(*) FROM done d WHERE NOT EXISTS (
            SELECT FROM run r
            WHERE r.job_id = d.job_id AND r.attempt = d.attempt AND r.outcome = 'succeeded'
              AND r.instance = ($4::jsonb ->> d.executor::text))) AS unproven
"""
)


async def verify(connection: "asyncpg.Connection[asyncpg.Record]", story: Story) -> list[Check]:
    """All checks of correctness, in the order in which they are shown."""
    await connection.execute("ANALYZE", timeout=CHECK_SECONDS)  # nothing may have done so since the tables were filled
    return [
        await _messages(connection, story),
        await _jobs(connection),
        await _order(connection, story),
        await _cut(connection, story),
    ]


async def _messages(connection: "asyncpg.Connection[asyncpg.Record]", story: Story) -> Check:
    row = await _row(connection, MESSAGES)
    return Check(
        "every message was applied exactly once",
        f"{row['produced']} sent, {story.in_topic} in Kafka, {row['applied']} applied",
        _problems(
            (row["produced"] == 0, "nothing was sent: the demo shows nothing"),
            (row["produced"] != story.in_topic, f"the topic holds {story.in_topic} messages"),
            (row["lost"], f"{row['lost']} messages were lost"),
            (row["twice"], f"{row['twice']} messages were applied twice"),
            (row["out_of_step"], f"{row['out_of_step']} transports do not stand at their last message"),
        ),
    )


async def _jobs(connection: "asyncpg.Connection[asyncpg.Record]") -> Check:
    row = await _row(connection, JOBS)
    return Check(
        "every message's job ended exactly once",
        f"{row['jobs']} jobs, {row['waiting']} left over",
        _problems(
            (row["waiting"], f"{row['waiting']} jobs are still in the table"),
            (row["without_end"], f"{row['without_end']} jobs have no end in the history"),
            (row["ended_twice"], f"{row['ended_twice']} jobs ended more than once"),
            (row["untold"], f"{row['untold']} messages never reached the carrier"),
            (row["doubled"], f"{row['doubled']} messages have more than one job"),
            (row["given_up"], f"{row['given_up']} jobs were given up or held"),
        ),
    )


async def _order(connection: "asyncpg.Connection[asyncpg.Record]", story: Story) -> Check:
    row = await _row(connection, ORDER, story.killed, story.killed_at)
    example = f" (e.g. {row['example']})"
    return Check(
        "every transport's jobs ran in order, never two at once",
        f"{row['runs']} runs in {row['groups']} groups",
        _problems(
            (row["inversions"], f"{row['inversions']} runs came after a later message's{example}"),
            (row["overlaps"], f"{row['overlaps']} runs began while another of their group ran{example}"),
        ),
    )


async def _cut(connection: "asyncpg.Connection[asyncpg.Record]", story: Story) -> Check:
    names = json.dumps({str(executor): name for executor, name in story.executors.items()})
    row = await _row(connection, CUT, story.killed, story.killed_at, story.killed_executor, names)
    return Check(
        f"only runs that died with {story.killed} were cut short, and all ran again",
        f"{row['cut']} cut short, {row['lost']} attempts lost, {row['told_twice']} ETAs told a second time",
        _problems(
            (row["cut_without_reason"], f"{row['cut_without_reason']} runs have no end, and no lost attempt says why"),
            (row["lost_by_others"], f"{row['lost_by_others']} attempts of living instances count as lost"),
            (
                row["succeeded_again"] > row["told_twice"],
                f"{row['succeeded_again']} jobs succeeded again, but only {row['told_twice']} were cut off by the kill",
            ),
            (row["unproven"], f"{row['unproven']} successes in the history have no such run in the audit"),
        ),
    )


async def _row(connection: "asyncpg.Connection[asyncpg.Record]", query: str, *arguments: Any) -> asyncpg.Record:
    row = await connection.fetchrow(query, *arguments, timeout=CHECK_SECONDS)
    assert row is not None
    return row


def _problems(*found: tuple[object, str]) -> list[str]:
    return [text for is_wrong, text in found if is_wrong]
