-- Held jobs, by origin and id. Plan: job_held, one origin after the other; ids are sorted within an origin
-- (id + 0: else all jobs might be walked by job_pkey in the hope of held ones).
-- $1 after this origin, $2 and this id, $3 origin or null, $4 group or null, $5 type or null, $6 most
SELECT v.id, v.type, v.origin, v."group", v.state, v.priority, v.attempt, v.failures, v.losses, v.enqueued_at,
       CASE WHEN v.run_at < 'infinity' THEN greatest(least(v.run_at, '9999-12-30Z'), '0001-01-03Z') END AS run_at,
       v.position, v.unique_key, v.held, v.error
FROM (
    (SELECT * FROM sidings.job_overview v
     WHERE $3::text IS NULL AND v.held IS NOT NULL AND (v.origin, v.id) > ($1::text, $2::bigint)
       AND ($5::text IS NULL OR v.type = $5)
     ORDER BY v.origin, v.id LIMIT $6)
    UNION ALL
    (SELECT * FROM sidings.job_overview v
     WHERE v.origin = $3 AND v.held IS NOT NULL AND v.id > $2
       AND ($4::text IS NULL OR v."group" = $4) AND ($5::text IS NULL OR v.type = $5)
     ORDER BY v.id + 0 LIMIT $6)
) v
