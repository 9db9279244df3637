-- One job with its payload and headers, as text: a caller's connection may have codecs of its own for json. $1 id
SELECT v.id, v.type, v.origin, v."group", v.state, v.priority, v.attempt, v.failures, v.losses, v.enqueued_at,
       nullif(v.run_at, 'infinity') AS run_at, v.position, v.unique_key, v.held, v.error,
       v.headers::text AS headers, v.payload::text AS payload
FROM sidings.job_overview v WHERE v.id = $1
