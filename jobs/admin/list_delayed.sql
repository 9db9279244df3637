-- Delayed jobs, in the order in which their origins' owners will promote them.
-- Plan: job_due walked in its own order from the last page on (ids decide between equal times: a sort of these alone). Those
-- of one group through job_group, sorted: no index has them by time. Of the three parts only the one that fits is run.
-- $1 after this origin, $2 due at (microseconds since 1970), $3 id; $4 origin or null, $5 group or null, $6 type or null, $7 most
(
    SELECT v.id, v.type, v.origin, v."group", v.state, v.priority, v.attempt, v.failures, v.losses, v.enqueued_at,
           nullif(v.run_at, 'infinity') AS run_at, v.position, v.unique_key, v.held, v.error
    FROM sidings.job_overview v
    WHERE $4::text IS NULL AND v.position IS NULL AND v.held IS NULL
      AND (v.origin, v.run_at, v.id) > ($1::text, timestamptz 'epoch' + $2::bigint * interval '1 microsecond', $3::bigint)
      AND ($6::text IS NULL OR v.type = $6)
    ORDER BY v.origin, v.run_at, v.id LIMIT $7
) UNION ALL (
    SELECT v.id, v.type, v.origin, v."group", v.state, v.priority, v.attempt, v.failures, v.losses, v.enqueued_at,
           nullif(v.run_at, 'infinity') AS run_at, v.position, v.unique_key, v.held, v.error
    FROM sidings.job_overview v
    WHERE $5::text IS NULL AND v.origin = $4 AND v.position IS NULL AND v.held IS NULL
      AND (v.run_at, v.id) > (timestamptz 'epoch' + $2::bigint * interval '1 microsecond', $3::bigint)
      AND ($6::text IS NULL OR v.type = $6)
    ORDER BY v.run_at, v.id LIMIT $7
) UNION ALL (
    SELECT v.id, v.type, v.origin, v."group", v.state, v.priority, v.attempt, v.failures, v.losses, v.enqueued_at,
           nullif(v.run_at, 'infinity') AS run_at, v.position, v.unique_key, v.held, v.error
    FROM sidings.job_overview v
    WHERE v.origin = $4 AND v."group" = $5 AND v.position IS NULL AND v.held IS NULL
      AND (v.run_at, v.id) > (timestamptz 'epoch' + $2::bigint * interval '1 microsecond', $3::bigint)
      AND ($6::text IS NULL OR v.type = $6)
    ORDER BY v.run_at, v.id LIMIT $7
)
