-- Delayed jobs, in the order in which their origins' owners will promote them.
-- A time that no datetime of Python's can be, as SQL may give, is shown as the nearest one that can; the cursor has it exactly, for which
-- days and microseconds are multiplied apart: the product is computed in floating point.
-- Plan: job_due walked in its own order from the last page on. Those of one group through job_group, sorted: no index has them by time. Of the
-- three parts only the one that fits is run.
-- $1 after this origin, $2 due at (microseconds since 1970), $3 id; $4 origin or null, $5 group or null, $6 type or null, $7 most
SELECT v.id, v.type, v.origin, v."group", v.state, v.priority, v.attempt, v.failures, v.losses, v.enqueued_at,
       CASE WHEN v.run_at < 'infinity' THEN greatest(least(v.run_at, '9999-12-30Z'), '0001-01-03Z') END AS run_at,
       v.position, v.unique_key, v.held, v.error,
       least(extract(epoch FROM v.run_at) * 1000000, 9223372036854775807)::bigint AS due_microseconds
FROM (
    (SELECT * FROM sidings.job_overview v
     WHERE $4::text IS NULL AND v.position IS NULL AND v.held IS NULL
       AND (v.origin, v.run_at, v.id) > ($1::text, timestamptz 'epoch' + $2::bigint / 86400000000 * interval '24 hours'
                                   + $2::bigint % 86400000000 * interval '1 microsecond', $3::bigint)
       AND ($6::text IS NULL OR v.type = $6)
     ORDER BY v.origin, v.run_at, v.id LIMIT $7)
    UNION ALL
    (SELECT * FROM sidings.job_overview v
     WHERE $5::text IS NULL AND v.origin = $4 AND v.position IS NULL AND v.held IS NULL
       AND (v.run_at, v.id) > (timestamptz 'epoch' + $2::bigint / 86400000000 * interval '24 hours'
                                   + $2::bigint % 86400000000 * interval '1 microsecond', $3::bigint)
       AND ($6::text IS NULL OR v.type = $6)
     ORDER BY v.run_at, v.id LIMIT $7)
    UNION ALL
    (SELECT * FROM sidings.job_overview v
     WHERE v.origin = $4 AND v."group" = $5 AND v.position IS NULL AND v.held IS NULL
       AND (v.run_at, v.id) > (timestamptz 'epoch' + $2::bigint / 86400000000 * interval '24 hours'
                                   + $2::bigint % 86400000000 * interval '1 microsecond', $3::bigint)
       AND ($6::text IS NULL OR v.type = $6)
     ORDER BY v.run_at, v.id LIMIT $7)
) v
