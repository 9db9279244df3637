-- `insert_job.sql` for an origin of a topic that has grown: the job goes where its group has jobs already.
-- $1 type, $2 origin, $3 group, $4 priority, $5 run at, $6 delay in seconds, $7 headers, $8 payload, $9 policy, $10 key of
-- the message
INSERT INTO sidings.job (type, origin, "group", priority, run_at, headers, payload, policy, position)
VALUES ($1, sidings.place($2::text, $3::text, $10::bytea), $3, $4,
        coalesce($5::timestamptz, clock_timestamp() + $6::float8 * interval '1 second'),
        $7::text::jsonb, $8::text::json, $9,
        CASE WHEN $5::timestamptz IS NULL AND $6::float8 IS NULL AND pg_current_xact_id() IS NOT NULL
             THEN nextval('sidings.job_position') END)
RETURNING id, origin
