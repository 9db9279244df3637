-- Jobs that have a position, in the order of their origins' positions.
-- Plan: job_scan, or for one group job_group, walked in their own order from the last page on. Of the three parts only the
-- one that fits is run: the conditions on $3 and $4 are tested once, before anything is read.
-- $1 after this origin, $2 and this position, $3 origin or null, $4 group or null, $5 type or null, $6 state or null, $7 most
SELECT v.id, v.type, v.origin, v."group", v.state, v.priority, v.attempt, v.failures, v.losses, v.enqueued_at,
       CASE WHEN v.run_at < 'infinity' THEN greatest(least(v.run_at, '9999-12-30Z'), '0001-01-03Z') END AS run_at,
       v.position, v.unique_key, v.held, v.error
FROM (
    (SELECT * FROM sidings.job_overview v
     WHERE $3::text IS NULL AND v.position IS NOT NULL AND (v.origin, v.position) > ($1::text, $2::bigint)
       AND ($5::text IS NULL OR v.type = $5) AND ($6::text IS NULL OR v.state = $6)
     ORDER BY v.origin, v.position LIMIT $7)
    UNION ALL
    (SELECT * FROM sidings.job_overview v
     WHERE $4::text IS NULL AND v.origin = $3 AND v.position > $2
       AND ($5::text IS NULL OR v.type = $5) AND ($6::text IS NULL OR v.state = $6)
     ORDER BY v.position LIMIT $7)
    UNION ALL
    (SELECT * FROM sidings.job_overview v
     WHERE v.origin = $3 AND v."group" = $4 AND v.position > $2
       AND ($5::text IS NULL OR v.type = $5) AND ($6::text IS NULL OR v.state = $6)
     ORDER BY v.position LIMIT $7)
) v
