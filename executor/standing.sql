-- After a void or unanswered cycle, and when a read has found a larger fence: what the database says of this executor, in one
-- snapshot. A takeover changes `fence` and the origin in one transaction, as does a person's intervention with the jobs, so
-- they agree. `gone`: jobs that it names although they are no more: somebody else has ended them.
-- Another `timeline` than that of the last read: a failover, which no read has noticed yet.
-- No row: it was removed. $1 executor
SELECT e.cycle, e.fence, sidings.timeline() AS timeline,
       ARRAY(SELECT o.origin FROM sidings.origin o WHERE o.owner = e.id ORDER BY o.origin) AS origins,
       ARRAY(SELECT o.epoch FROM sidings.origin o WHERE o.owner = e.id ORDER BY o.origin) AS epochs,
       ARRAY(SELECT r.id FROM unnest(e.running) r (id)
             WHERE NOT EXISTS (SELECT FROM sidings.job j WHERE j.id = r.id)) AS gone
FROM sidings.executor e WHERE e.id = $1
