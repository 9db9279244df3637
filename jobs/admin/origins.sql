-- Origins that have jobs, or a row, as all do that were ever held or paused: who holds them, what is there, how many groups stand still.
-- Plan: the names from one origin to the next by a probe each into job_scan, job_due and job_held (as orphans.sql); then for each
-- index-only counts, up to $1. What fails is read once, from job_backoff; is it a head? job_group, one probe each. What runs: job_pkey,
-- driven by the newest versions of the executors' rows, as in the view sidings.job_overview (OFFSET 0: else it may become a join that
-- scans the table).
-- The slots of the outbox (outbox/0 to outbox/15) stand in the same table; what jobs SQL has put there nobody holds, for a relay runs
-- none. $1 most to count
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
), running AS MATERIALIZED (
    SELECT j.id, j.origin
    FROM (SELECT DISTINCT unnest(n.running) AS id
          FROM (SELECT DISTINCT o.owner FROM sidings.origin o WHERE o.owner IS NOT NULL) h,
               LATERAL (SELECT x.running FROM sidings.executor x
                        WHERE uuid_send(x.id) = uuid_send(h.owner) ORDER BY x.era DESC LIMIT 1) n) r
    JOIN LATERAL (SELECT j.id, j.origin FROM sidings.job j WHERE j.id = r.id AND j.held IS NULL OFFSET 0) j ON true
), runs AS MATERIALIZED (
    SELECT r.origin, count(*) AS running FROM running r GROUP BY r.origin
), fails AS MATERIALIZED (
    SELECT j.origin, count(*) FILTER (WHERE j.run_at < 'infinity') AS backing_off,
           count(*) FILTER (WHERE j.run_at = 'infinity') AS blocked,
           count(*) FILTER (WHERE j.policy <> 2 AND j.position = (
               SELECT b.position FROM sidings.job b
               WHERE b.origin = j.origin AND b."group" = j."group" AND b.position IS NOT NULL AND b.policy <> 2
               ORDER BY b.position LIMIT 1)) AS groups
    FROM sidings.job j
    WHERE j.position IS NOT NULL AND (j.attempt > 1 OR j.failures > 0) AND j.run_at > statement_timestamp()
      AND j.id NOT IN (SELECT r.id FROM running r)
    GROUP BY j.origin
), known AS (
    SELECT n.origin, coalesce(r.running, 0) AS running, coalesce(f.backing_off, 0) AS backing_off, coalesce(f.blocked, 0) AS blocked,
           coalesce(f.groups, 0) AS blocked_groups
    FROM (SELECT n.origin FROM named n WHERE n.origin IS NOT NULL
          UNION SELECT o.origin FROM sidings.origin o WHERE o.origin !~ '^outbox/([0-9]|1[0-5])$') n
    LEFT JOIN runs r ON r.origin = n.origin
    LEFT JOIN fails f ON f.origin = n.origin
)
SELECT k.origin, o.epoch, o.owner, e.host, e.pid, o.lease_until, coalesce(o.lease_until > clock_timestamp(), false) AS leased,
       greatest((SELECT count(*) FROM (SELECT FROM sidings.job j WHERE j.origin = k.origin AND j.position IS NOT NULL
                                       LIMIT $1 + k.running + k.backing_off + k.blocked) x)
                - k.running - k.backing_off - k.blocked, 0) AS waiting,
       k.running, k.backing_off, k.blocked,
       (SELECT count(*) FROM (SELECT FROM sidings.job j WHERE j.origin = k.origin AND j.position IS NULL AND j.held IS NULL LIMIT $1) x)
           AS delayed,
       (SELECT count(*) FROM (SELECT FROM sidings.job j WHERE j.origin = k.origin AND j.held IS NOT NULL LIMIT $1) x) AS held,
       (SELECT j.enqueued_at FROM sidings.job j WHERE j.origin = k.origin AND j.position IS NOT NULL ORDER BY j.position LIMIT 1) AS oldest,
       k.blocked_groups, p.paused_by, p.paused_at, p.reason AS pause_reason
FROM known k
LEFT JOIN sidings.origin o ON o.origin = k.origin AND o.origin !~ '^outbox/([0-9]|1[0-5])$'
LEFT JOIN LATERAL (SELECT x.host, x.pid FROM sidings.executor x
                   WHERE uuid_send(x.id) = uuid_send(o.owner) ORDER BY x.era DESC LIMIT 1) e ON true
LEFT JOIN sidings.pause p ON p.kind = 'origin' AND p.origin = k.origin
ORDER BY k.origin
