-- `insert_placed_jobs.sql` where each job has headers of its own; see `insert_jobs_with_headers.sql`.
-- $1 type, $2 origin, $3 groups, $4 priority, $5 run at, $6 delay in seconds, $7 headers of each, $8 payloads, $9 policy,
-- $10 key of the message
INSERT INTO sidings.job (type, origin, "group", priority, run_at, headers, payload, policy, position)
SELECT $1, sidings.place($2::text, u."group", $10::bytea), u."group", $4,
       coalesce($5::timestamptz, clock_timestamp() + $6::float8 * interval '1 second'),
       u.headers::jsonb, u.payload::json, $9,
       CASE WHEN $5::timestamptz IS NULL AND $6::float8 IS NULL AND pg_current_xact_id() IS NOT NULL
            THEN nextval('sidings.job_position') END
FROM ROWS FROM (unnest(string_to_array($3::text, E'\x1f')), unnest(string_to_array($7::text, E'\x1f', '')),
                unnest(string_to_array($8::text, E'\x1f'))) AS u ("group", headers, payload)
RETURNING id, origin
