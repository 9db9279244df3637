-- The first origin between each two that are held, if jobs wait there for longer than $1 seconds: nobody runs them.
-- Plan: a probe into job_scan for each gap. What the holders have deleted is not stepped over, as it lies in their origins.
WITH held AS (
    SELECT o.origin FROM sidings.origin o WHERE o.owner IS NOT NULL AND o.lease_until >= clock_timestamp()
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
)
SELECT f.origin FROM found f
WHERE f.enqueued_at < clock_timestamp() - make_interval(secs => $1)
ORDER BY f.origin
