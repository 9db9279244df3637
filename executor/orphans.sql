-- The first origin between each two that are held, if jobs wait there for longer than $1 seconds: nobody runs them. So, too, the first one
-- where a delayed job has been due for as long, which nobody promotes, and the first one that has a held job, enqueued before that: no
-- executor counts it among those that wait for a person.
-- Plan: a probe into job_scan and job_held for each gap, and into job_due, one more for each origin there whose delayed jobs are not due.
-- What the holders have deleted is not stepped over, as it lies in their origins.
WITH RECURSIVE held AS (
    SELECT o.origin FROM sidings.origin o
    WHERE o.owner IS NOT NULL AND o.lease_until >= clock_timestamp() AND o.origin NOT LIKE 'outbox/%'  -- those are relays'
), gap (above, below) AS (
    SELECT h.origin, lead(h.origin) OVER (ORDER BY h.origin) FROM held h
    UNION ALL
    SELECT '', min(h.origin) FROM held h
), last (above) AS (
    SELECT coalesce(max(h.origin), '') FROM held h
), found AS (
    SELECT f.origin, f.enqueued_at
    FROM gap g CROSS JOIN LATERAL (
        SELECT j.origin, j.enqueued_at FROM sidings.job j
        WHERE j.position IS NOT NULL AND j.origin > g.above AND j.origin < g.below ORDER BY j.origin, j.position LIMIT 1) f
    UNION ALL
    SELECT f.origin, f.enqueued_at
    FROM last l CROSS JOIN LATERAL (
        SELECT j.origin, j.enqueued_at FROM sidings.job j
        WHERE j.position IS NOT NULL AND j.origin > l.above ORDER BY j.origin, j.position LIMIT 1) f
    UNION ALL
    SELECT f.origin, f.enqueued_at
    FROM gap g CROSS JOIN LATERAL (
        SELECT j.origin, j.enqueued_at FROM sidings.job j
        WHERE j.held IS NOT NULL AND j.origin > g.above AND j.origin < g.below ORDER BY j.origin LIMIT 1) f
    UNION ALL
    SELECT f.origin, f.enqueued_at
    FROM last l CROSS JOIN LATERAL (
        SELECT j.origin, j.enqueued_at FROM sidings.job j
        WHERE j.held IS NOT NULL AND j.origin > l.above ORDER BY j.origin LIMIT 1) f
), between (below, origin, run_at) AS (
    SELECT g.below, f.origin, f.run_at
    FROM gap g CROSS JOIN LATERAL (
        SELECT j.origin, j.run_at FROM sidings.job j
        WHERE j.position IS NULL AND j.held IS NULL AND j.origin > g.above AND j.origin < g.below
        ORDER BY j.origin, j.run_at LIMIT 1) f
    UNION ALL
    SELECT b.below, f.origin, f.run_at
    FROM between b CROSS JOIN LATERAL (
        SELECT j.origin, j.run_at FROM sidings.job j
        WHERE j.position IS NULL AND j.held IS NULL AND j.origin > b.origin AND j.origin < b.below
        ORDER BY j.origin, j.run_at LIMIT 1) f
    WHERE b.run_at >= clock_timestamp() - make_interval(secs => $1)
), behind (origin, run_at) AS (
    SELECT f.origin, f.run_at
    FROM last l CROSS JOIN LATERAL (
        SELECT j.origin, j.run_at FROM sidings.job j
        WHERE j.position IS NULL AND j.held IS NULL AND j.origin > l.above ORDER BY j.origin, j.run_at LIMIT 1) f
    UNION ALL
    SELECT f.origin, f.run_at
    FROM behind b CROSS JOIN LATERAL (
        SELECT j.origin, j.run_at FROM sidings.job j
        WHERE j.position IS NULL AND j.held IS NULL AND j.origin > b.origin ORDER BY j.origin, j.run_at LIMIT 1) f
    WHERE b.run_at >= clock_timestamp() - make_interval(secs => $1)
)
SELECT f.origin
FROM (SELECT * FROM found UNION ALL SELECT * FROM behind UNION ALL SELECT b.origin, b.run_at FROM between b) f (origin, since)
WHERE f.since < clock_timestamp() - make_interval(secs => $1)
GROUP BY f.origin ORDER BY f.origin
