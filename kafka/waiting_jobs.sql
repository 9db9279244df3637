-- How many jobs wait in each origin, counted up to a limit, and the first one's position: the next count starts there, so
-- that it does not step over the entries of jobs that are long gone. A job that commits late, below it, is left out.
-- $1 origins, $2 positions to count from, $3 limits
-- Plan: nested loop from unnest() into job_scan, ended by the LIMIT.
SELECT o.origin, count(w.position) AS waiting, min(w.position) AS first
FROM unnest($1::text[], $2::bigint[], $3::bigint[]) AS o (origin, low, most)
LEFT JOIN LATERAL (SELECT j.position FROM sidings.job j
                   WHERE j.origin = o.origin AND j.position >= o.low ORDER BY j.position LIMIT o.most) w ON true
GROUP BY o.origin
