-- `insert_home_jobs.sql` where each job has headers of its own; see `insert_jobs_with_headers.sql`.
-- $1 type, $2 topic, $3 groups, $4 priority, $5 run at, $6 delay in seconds, $7 headers of each, $8 payloads, $9 policy
INSERT INTO sidings.job (type, origin, "group", priority, run_at, headers, payload, policy, position)
SELECT $1, u.origin, u."group", $4, coalesce($5::timestamptz, clock_timestamp() + $6::float8 * interval '1 second'),
       u.headers::jsonb, u.payload::json, $9,
       CASE WHEN $5::timestamptz IS NULL AND $6::float8 IS NULL AND pg_current_xact_id() IS NOT NULL
            THEN nextval('sidings.job_position') END
FROM (SELECT sidings.home_origin(g."group", $2::text) AS origin, g."group", g.headers, g.payload
      FROM ROWS FROM (unnest(string_to_array($3::text, E'\x1f')), unnest(string_to_array($7::text, E'\x1f', '')),
                      unnest(string_to_array($8::text, E'\x1f'))) AS g ("group", headers, payload)) u
WHERE EXISTS (SELECT FROM sidings.topic t WHERE t.topic = $2::text)
RETURNING id, origin
