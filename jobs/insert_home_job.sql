-- `insert_job.sql` for a type that has a home: the origin is that of its group among the partitions of the home topic. No
-- row where these are not known; an error would spoil the caller's transaction.
-- $1 type, $2 topic, $3 group, $4 priority, $5 run at, $6 delay in seconds, $7 headers, $8 payload, $9 policy
INSERT INTO sidings.job (type, origin, "group", priority, run_at, headers, payload, policy, position)
SELECT $1, h.origin, $3, $4, coalesce($5::timestamptz, clock_timestamp() + $6::float8 * interval '1 second'),
       $7::text::jsonb, $8::text::json, $9,
       CASE WHEN $5::timestamptz IS NULL AND $6::float8 IS NULL AND pg_current_xact_id() IS NOT NULL
            THEN nextval('sidings.job_position') END
FROM sidings.home_origin($3::text, $2::text) AS h (origin)
WHERE h.origin IS NOT NULL
RETURNING id, origin
