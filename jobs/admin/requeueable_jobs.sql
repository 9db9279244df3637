-- Jobs that ended without success and were not requeued since, but those whose payload was erased, and messages that are delivered
-- again; in the order in which they were enqueued: as they stood in their groups. By `finished_at` a cleared group would come back
-- from its end to its head, in pieces. Partitions outside of the times are not touched; within them the first rows are kept in a heap
-- of $6. The audit is probed by its indexes (`audit_job`, `audit_reset`), or hashed.
-- $1 outcomes, $2 not before (null: 24 hours ago), $3 before (null: no end, for what has ended while the clock was ahead), $4 type or null,
-- $5 origin or null, $6 most, $7 also those that were requeued, and those messages, $8 the error class of a handler's own decision,
-- $9 whether those have it that are wanted (null: it does not matter)
SELECT h.job_id, h.type, h.origin, h."group", h.attempt, h.outcome::text AS outcome, h.enqueued_at,
       CASE WHEN h.due_at < 'infinity' THEN greatest(least(h.due_at, '9999-12-30Z'), '0001-01-03Z') END AS due_at,
       h.started_at, h.finished_at,
       h.executor, h.epoch, h.error_class, h.error_message, h.correlation_id
FROM sidings.job_history h
WHERE h.finished_at >= coalesce($2::timestamptz, statement_timestamp() - interval '24 hours')
  AND h.finished_at < coalesce($3::timestamptz, 'infinity') AND h.outcome = ANY ($1::text[]::sidings.outcome[])
  AND h.payload IS NOT NULL   -- or whoever asks until there are none would do so for ever
  AND ($9::boolean IS NULL OR (h.error_class IS NOT DISTINCT FROM $8::text) = $9)
  AND ($4::text IS NULL OR h.type = $4) AND ($5::text IS NULL OR h.origin = $5)
  AND ($7 OR NOT EXISTS (SELECT FROM sidings.audit a
                         WHERE (a.target ->> 'job')::bigint = h.job_id AND a.target ? 'job' AND a.action = 'requeue')
             AND NOT EXISTS (SELECT FROM sidings.delivered_again(h.type, h.payload, h.enqueued_at)))
ORDER BY h.job_id LIMIT $6
