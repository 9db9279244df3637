-- Groups whose head keeps the others waiting, the longest first: it backs off, is blocked, or its group is paused.
-- Plan: job_backoff for what is due later; is it the head? job_group, one probe each (subqueries with LIMIT or OFFSET 0, because
-- others may become joins that scan the table). What waits behind is counted for the rows that are shown only, and up to $3.
-- Policy 2 is "parallel": such jobs are in no order. A paused group in which no others wait stands with the first of them.
-- $1 origin or null, $2 most, $3 most to count
WITH heads AS MATERIALIZED (
    (SELECT j.origin, j."group", j.id, j.position, coalesce(j.first_started_at, j.enqueued_at) AS since
     FROM sidings.job j
     WHERE j.position IS NOT NULL AND (j.attempt > 1 OR j.failures > 0) AND j.run_at > statement_timestamp()
       AND j."group" IS NOT NULL AND j.policy <> 2 AND ($1::text IS NULL OR j.origin = $1)
       AND j.position = (SELECT b.position FROM sidings.job b
                         WHERE b.origin = j.origin AND b."group" = j."group" AND b.position IS NOT NULL AND b.policy <> 2
                         ORDER BY b.position LIMIT 1)
     ORDER BY since LIMIT $2)
    UNION ALL
    (SELECT p.origin, p."group", h.id, h.position, p.paused_at
     FROM sidings.pause p,
          LATERAL (SELECT f.* FROM (
                       (SELECT j.id, j.position, j.run_at, j.policy FROM sidings.job j
                        WHERE j.origin = p.origin AND j."group" = p."group" AND j.position IS NOT NULL AND j.policy <> 2
                        ORDER BY j.position LIMIT 1)
                       UNION ALL
                       (SELECT j.id, j.position, j.run_at, j.policy FROM sidings.job j
                        WHERE j.origin = p.origin AND j."group" = p."group" AND j.position IS NOT NULL
                        ORDER BY j.position LIMIT 1)) f
                   ORDER BY f.policy = 2 LIMIT 1) h
     WHERE p.kind = 'group' AND ($1::text IS NULL OR p.origin = $1)
       AND (h.run_at IS NULL OR h.run_at <= statement_timestamp())
     ORDER BY p.paused_at LIMIT $2)
)
SELECT h.origin, h."group", h.since, v.id AS head, v.type, v.state, v.failures,
       CASE WHEN v.run_at < 'infinity' THEN greatest(least(v.run_at, '9999-12-30Z'), '0001-01-03Z') END AS next_at,
       v.error,
       (SELECT count(*) FROM (SELECT FROM sidings.job w
                              WHERE w.origin = h.origin AND w."group" = h."group" AND w.position > h.position
                              LIMIT $3) w) AS behind,
       p.paused_by, p.paused_at, p.reason AS pause_reason
FROM (SELECT * FROM heads ORDER BY since LIMIT $2) h
JOIN LATERAL (SELECT * FROM sidings.job_overview v WHERE v.id = h.id OFFSET 0) v ON true
LEFT JOIN sidings.pause p ON p.kind = 'group' AND p.origin = h.origin AND p."group" = h."group"
ORDER BY h.since
