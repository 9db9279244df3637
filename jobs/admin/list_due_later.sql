-- Jobs that have a position and have never failed, and that are due later all the same: they were promoted before the clock was set back.
-- They back off as the view has it, and job_backoff does not have them. By origin and position.
-- Plan: job_scan, from one origin to the next by a probe each, and the first $6 of each origin: those that were promoted before come to
-- the front, or stand behind as many that stand still. Of one origin all (job_scan), and of one group (job_group). Of the three parts only
-- the one that fits is run.
-- $1 after this origin, $2 and this position, $3 origin or null, $4 group or null, $5 type or null, $6 most of an origin, $7 most
WITH RECURSIVE named (origin) AS (
    (SELECT j.origin FROM sidings.job j
     WHERE $3::text IS NULL AND j.position IS NOT NULL AND j.origin >= $1::text ORDER BY j.origin LIMIT 1)
    UNION ALL
    SELECT (SELECT j.origin FROM sidings.job j WHERE j.position IS NOT NULL AND j.origin > n.origin ORDER BY j.origin LIMIT 1)
    FROM named n WHERE n.origin IS NOT NULL
)
SELECT v.id, v.type, v.origin, v."group", v.state, v.priority, v.attempt, v.failures, v.losses, v.enqueued_at,
       CASE WHEN v.run_at < 'infinity' THEN greatest(least(v.run_at, '9999-12-30Z'), '0001-01-03Z') END AS run_at,
       v.position, v.unique_key, v.held, v.error
FROM (
    (SELECT v.* FROM named n,
         LATERAL (SELECT * FROM sidings.job_overview o
                  WHERE o.origin = n.origin AND o.position IS NOT NULL ORDER BY o.position LIMIT $6) v
     WHERE v.state = 'backing off' AND NOT (v.attempt > 1 OR v.failures > 0)
       AND (v.origin, v.position) > ($1::text, $2::bigint) AND ($5::text IS NULL OR v.type = $5)
     ORDER BY v.origin, v.position LIMIT $7)
    UNION ALL
    (SELECT * FROM sidings.job_overview v
     WHERE $4::text IS NULL AND v.origin = $3 AND v.position > $2
       AND v.state = 'backing off' AND NOT (v.attempt > 1 OR v.failures > 0) AND ($5::text IS NULL OR v.type = $5)
     ORDER BY v.position LIMIT $7)
    UNION ALL
    (SELECT * FROM sidings.job_overview v
     WHERE v.origin = $3 AND v."group" = $4 AND v.position > $2
       AND v.state = 'backing off' AND NOT (v.attempt > 1 OR v.failures > 0) AND ($5::text IS NULL OR v.type = $5)
     ORDER BY v.position LIMIT $7)
) v
