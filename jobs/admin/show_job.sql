-- One job with its payload and headers, as text: a caller's connection may have codecs of its own for json. $1 id
SELECT v.id, v.type, v.origin, v."group", v.state, v.priority, v.attempt, v.failures, v.losses, v.enqueued_at,
       CASE WHEN v.run_at < 'infinity' THEN greatest(least(v.run_at, '9999-12-30Z'), '0001-01-03Z') END AS run_at,
       v.position, v.unique_key, v.held, v.error,
       v.headers::text AS headers, v.payload::text AS payload
FROM sidings.job_overview v WHERE v.id = $1
