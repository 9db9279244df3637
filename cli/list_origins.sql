-- Origins and who holds them. The slots of the outbox (outbox/0 to outbox/15) stand in the same table; they have no jobs.
SELECT o.origin, o.epoch, o.owner, e.host, e.pid, e.started_at, o.lease_until, coalesce(o.lease_until > clock_timestamp(), false) AS held,
       coalesce(cardinality(e.running), 0) AS named
FROM sidings.origin o LEFT JOIN sidings.executor e ON e.id = o.owner
WHERE o.origin !~ '^outbox/([0-9]|1[0-5])$'
ORDER BY o.origin
