-- Jobs that back off, by the time of their next attempt, or are blocked ($1 is null: 'infinity').
-- Plan: job_backoff walked in its own order (ids decide between equal times: a sort of these alone).
-- $1 after this time (microseconds since 1970), $2 and this id, $3 origin or null, $4 group or null, $5 type or null, $6 state,
-- $7 most
SELECT v.id, v.type, v.origin, v."group", v.state, v.priority, v.attempt, v.failures, v.losses, v.enqueued_at,
       CASE WHEN v.run_at < 'infinity' THEN greatest(least(v.run_at, '9999-12-30Z'), '0001-01-03Z') END AS run_at,
       v.position, v.unique_key, v.held, v.error,
       least(extract(epoch FROM v.run_at) * 1000000, 9223372036854775807)::bigint AS due_microseconds
FROM sidings.job_overview v
WHERE v.position IS NOT NULL AND (v.attempt > 1 OR v.failures > 0)
  AND (v.run_at, v.id) > (coalesce(timestamptz 'epoch' + $1::bigint / 86400000000 * interval '24 hours'
                                 + $1::bigint % 86400000000 * interval '1 microsecond', 'infinity'), $2::bigint)
  AND ($3::text IS NULL OR v.origin = $3) AND ($4::text IS NULL OR v."group" = $4) AND ($5::text IS NULL OR v.type = $5)
  AND v.state = $6
ORDER BY v.run_at, v.id LIMIT $7
