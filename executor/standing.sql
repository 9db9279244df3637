-- After a void or unanswered cycle, and when a read has found a larger fence: what the database says of this executor, in one
-- snapshot. A takeover changes `fence` and the origin in one transaction, as does a person's intervention with the jobs, so
-- they agree. `gone`: jobs that it names although they are no more: somebody else has ended them. `actions`: what persons have
-- done at fences above $2, one row for each job or group; only of these it is known what they concerned. Cut short, they
-- explain nothing: 2,000 jobs are one transaction. Nor does one without its group, which somebody has erased.
-- Plan: audit_fence, never a scan of audit.
-- Another `timeline` than that of the last read: a failover, which no read has noticed yet.
-- No row: it was removed. $1 executor, $2 the fence that it knows, $3 most actions
SELECT e.cycle, e.fence, sidings.timeline() AS timeline,
       ARRAY(SELECT o.origin FROM sidings.origin o WHERE o.owner = e.id ORDER BY o.origin) AS origins,
       ARRAY(SELECT o.epoch FROM sidings.origin o WHERE o.owner = e.id ORDER BY o.origin) AS epochs,
       ARRAY(SELECT r.id FROM unnest(e.running) r (id)
             WHERE NOT EXISTS (SELECT FROM sidings.job j WHERE j.id = r.id)) AS gone,
       (SELECT jsonb_agg(jsonb_build_array(CASE WHEN a.target ? 'group' THEN a.fence END, a.action, a.target -> 'origin', a.target -> 'group', a.target -> 'job'))
        FROM (SELECT * FROM sidings.audit a WHERE a.executor = e.id AND a.fence > $2 LIMIT $3) a) AS actions
FROM sidings.executor e WHERE e.id = $1
