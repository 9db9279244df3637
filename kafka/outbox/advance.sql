-- Move the sequence past the messages; executor/advance.sql has the reasons. $1 the highest id that was met
SELECT setval('sidings.outbox_id', greatest(i.last_value, $1::bigint, (SELECT max(p.id) FROM sidings.outbox_parked p))) AS id
FROM (SELECT pg_advisory_xact_lock(hashtextextended('sidings.advance', 0)) AS taken) AS one,
     LATERAL (SELECT q.last_value FROM sidings.outbox_id q WHERE one.taken IS NOT NULL OFFSET 0) AS i
