-- Jobs that ended with one of these outcomes, newest first. Partitions outside of the times are not touched; within them the newest rows
-- are kept in a heap of $6, for the time of the last one: jobs of one list (batch=) end in one instant, and the page has all of
-- them, since the next one begins before that.
-- $1 outcomes, $2 not before (null: 24 hours ago), $3 before (null: no end, for what has ended while the clock was ahead), $4 type or null,
-- $5 origin or null, $6 most
SELECT h.job_id, h.type, h.origin, h."group", h.attempt, h.outcome::text AS outcome, h.enqueued_at,
       CASE WHEN h.due_at < 'infinity' THEN greatest(least(h.due_at, '9999-12-30Z'), '0001-01-03Z') END AS due_at,
       h.started_at, h.finished_at,
       h.executor, h.epoch, h.error_class, h.error_message, h.correlation_id
FROM sidings.job_history h
WHERE h.finished_at >= (SELECT min(l.finished_at)
                        FROM (SELECT h.finished_at FROM sidings.job_history h
                              WHERE h.finished_at >= coalesce($2::timestamptz, statement_timestamp() - interval '24 hours')
                                AND h.finished_at < coalesce($3::timestamptz, 'infinity') AND h.outcome = ANY ($1::text[]::sidings.outcome[])
                                AND ($4::text IS NULL OR h.type = $4) AND ($5::text IS NULL OR h.origin = $5)
                              ORDER BY h.finished_at DESC LIMIT $6) l)
  AND h.finished_at < coalesce($3::timestamptz, 'infinity') AND h.outcome = ANY ($1::text[]::sidings.outcome[])
  AND ($4::text IS NULL OR h.type = $4) AND ($5::text IS NULL OR h.origin = $5)
ORDER BY h.finished_at DESC, h.job_id DESC
