-- Jobs that back off, by the time of their next attempt, or are blocked ($1 is null: 'infinity').
-- Plan: job_backoff walked in its own order (ids decide between equal times: a sort of these alone).
-- $1 after this time (microseconds since 1970), $2 and this id, $3 origin or null, $4 group or null, $5 type or null, $6 state,
-- $7 most
SELECT v.id, v.type, v.origin, v."group", v.state, v.priority, v.attempt, v.failures, v.losses, v.enqueued_at,
       nullif(v.run_at, 'infinity') AS run_at, v.position, v.unique_key, v.held, v.error
FROM sidings.job_overview v
WHERE v.position IS NOT NULL AND (v.attempt > 1 OR v.failures > 0)
  AND (v.run_at, v.id) > (coalesce(timestamptz 'epoch' + $1::bigint * interval '1 microsecond', 'infinity'), $2::bigint)
  AND ($3::text IS NULL OR v.origin = $3) AND ($4::text IS NULL OR v."group" = $4) AND ($5::text IS NULL OR v.type = $5)
  AND v.state = $6
ORDER BY v.run_at, v.id LIMIT $7
