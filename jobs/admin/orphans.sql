-- Origins that have jobs and that nobody holds, with what is left there.
-- Plan: from one origin to the next by a probe each into job_scan, job_due and job_held, so the number of jobs does not count;
-- then index-only counts for the orphans. least() passes over an index that has no further origin.
WITH RECURSIVE named (origin) AS (
    SELECT least((SELECT j.origin FROM sidings.job j WHERE j.position IS NOT NULL ORDER BY j.origin LIMIT 1),
                 (SELECT j.origin FROM sidings.job j WHERE j.position IS NULL AND j.held IS NULL ORDER BY j.origin LIMIT 1),
                 (SELECT j.origin FROM sidings.job j WHERE j.held IS NOT NULL ORDER BY j.origin LIMIT 1))
    UNION ALL
    SELECT least((SELECT j.origin FROM sidings.job j WHERE j.position IS NOT NULL AND j.origin > n.origin
                  ORDER BY j.origin LIMIT 1),
                 (SELECT j.origin FROM sidings.job j WHERE j.position IS NULL AND j.held IS NULL AND j.origin > n.origin
                  ORDER BY j.origin LIMIT 1),
                 (SELECT j.origin FROM sidings.job j WHERE j.held IS NOT NULL AND j.origin > n.origin ORDER BY j.origin LIMIT 1))
    FROM named n WHERE n.origin IS NOT NULL
)
SELECT n.origin, o.owner AS former_owner, o.lease_until, e.host, e.pid,
       (SELECT count(*) FROM sidings.job j WHERE j.origin = n.origin AND j.position IS NOT NULL) AS waiting,
       (SELECT count(*) FROM sidings.job j WHERE j.origin = n.origin AND j.position IS NULL AND j.held IS NULL) AS delayed,
       (SELECT count(*) FROM sidings.job j WHERE j.origin = n.origin AND j.held IS NOT NULL) AS held,
       least((SELECT j.enqueued_at FROM sidings.job j WHERE j.origin = n.origin AND j.position IS NOT NULL
              ORDER BY j.position LIMIT 1),
             (SELECT j.enqueued_at FROM sidings.job j WHERE j.origin = n.origin AND j.position IS NULL AND j.held IS NULL
              ORDER BY j.run_at LIMIT 1),
             (SELECT min(j.enqueued_at) FROM sidings.job j WHERE j.origin = n.origin AND j.held IS NOT NULL)) AS oldest
FROM named n
LEFT JOIN sidings.origin o ON o.origin = n.origin
LEFT JOIN LATERAL (SELECT x.host, x.pid FROM sidings.executor x
                   WHERE uuid_send(x.id) = uuid_send(o.owner) ORDER BY x.era DESC LIMIT 1) e ON true
WHERE n.origin IS NOT NULL
  AND (o.owner IS NULL OR o.lease_until < clock_timestamp() OR o.origin LIKE 'outbox/%') -- a relay runs no jobs
ORDER BY n.origin
