-- Move the sequences past the jobs. A logical replication carries rows and no sequences, a restored table neither; new jobs would then
-- stand before old ones, behind the marks, where no read looks. Of executors that do this at once each waits for the one before it: what
-- has been drawn is looked at under the lock. $1 the highest position that was met
SELECT setval('sidings.job_position', greatest(p.last_value, $1::bigint)) AS position,
       setval('sidings.job_id_seq', greatest(i.last_value, (SELECT max(j.id) FROM sidings.job j))) AS id
FROM (SELECT pg_advisory_xact_lock(hashtextextended('sidings.advance', 0)) AS taken) AS one,
     LATERAL (SELECT q.last_value FROM sidings.job_position q WHERE one.taken IS NOT NULL OFFSET 0) AS p,
     LATERAL (SELECT q.last_value FROM sidings.job_id_seq q WHERE one.taken IS NOT NULL OFFSET 0) AS i
