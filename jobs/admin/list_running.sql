-- What holders have named, by id: some hundreds each, so they may be sorted. Plan: job_pkey, driven by the newest versions of the
-- executors' rows, as in the view (OFFSET 0: else it may become a join that scans the table).
-- $1 after this id, $2 origin or null, $3 group or null, $4 type or null, $5 most
SELECT v.id, v.type, v.origin, v."group", v.state, v.priority, v.attempt, v.failures, v.losses, v.enqueued_at,
       CASE WHEN v.run_at < 'infinity' THEN greatest(least(v.run_at, '9999-12-30Z'), '0001-01-03Z') END AS run_at,
       v.position, v.unique_key, v.held, v.error
FROM (SELECT DISTINCT unnest(n.running) AS id
      FROM (SELECT DISTINCT o.owner FROM sidings.origin o WHERE o.owner IS NOT NULL) h,
           LATERAL (SELECT x.running FROM sidings.executor x
                    WHERE uuid_send(x.id) = uuid_send(h.owner) ORDER BY x.era DESC LIMIT 1) n
      ORDER BY id) r   -- here already, so that no more jobs are looked at than the page has
JOIN LATERAL (SELECT * FROM sidings.job_overview v WHERE v.id = r.id OFFSET 0) v ON true
WHERE r.id > $1 AND v.state = 'running'
  AND ($2::text IS NULL OR v.origin = $2) AND ($3::text IS NULL OR v."group" = $3) AND ($4::text IS NULL OR v.type = $4)
ORDER BY r.id LIMIT $5
