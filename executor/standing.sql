-- After a void or unanswered cycle: what the database says of this executor, in one snapshot. A takeover changes `fence`
-- and the origin in one transaction, so the two agree. No row: it was removed. $1 executor
SELECT e.cycle, e.fence,
       ARRAY(SELECT o.origin FROM sidings.origin o WHERE o.owner = e.id ORDER BY o.origin) AS origins,
       ARRAY(SELECT o.epoch FROM sidings.origin o WHERE o.owner = e.id ORDER BY o.origin) AS epochs
FROM sidings.executor e WHERE e.id = $1
