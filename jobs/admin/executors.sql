-- Executors that are alive: that hold an origin under a lease that has not run out. Of those that hold nothing nobody knows it: their
-- row stays for a day, whether they live or not. Plan: as many rows as there are origins, and of each
-- executor the newest version.
-- The slots of the outbox (outbox/0 to outbox/15) are their relays'.
SELECT e.id, e.host, e.pid, e.started_at, h.origins, h.lease_until, cardinality(e.running) AS running
FROM (SELECT o.owner, count(*) AS origins, min(o.lease_until) AS lease_until FROM sidings.origin o
      WHERE o.lease_until > clock_timestamp() AND o.origin !~ '^outbox/([0-9]|1[0-5])$'
      GROUP BY o.owner) h,
     LATERAL (SELECT * FROM sidings.executor x WHERE uuid_send(x.id) = uuid_send(h.owner) ORDER BY x.era DESC LIMIT 1) e
ORDER BY e.host, e.pid
