-- One job in the caller's transaction: a bare INSERT, three index entries. A delayed job gets no position; the
-- condition of CASE takes the transaction id before nextval() runs.
-- JSON comes as text: a caller's connection may have a codec of its own for json.
-- $1 type, $2 origin, $3 group, $4 priority, $5 run at, $6 delay in seconds, $7 headers, $8 payload, $9 policy
INSERT INTO sidings.job (type, origin, "group", priority, run_at, headers, payload, policy, position)
VALUES ($1, $2, $3, $4, coalesce($5::timestamptz, clock_timestamp() + $6::float8 * interval '1 second'),
        $7::text::jsonb, $8::text::json, $9,
        CASE WHEN $5::timestamptz IS NULL AND $6::float8 IS NULL AND pg_current_xact_id() IS NOT NULL
             THEN nextval('sidings.job_position') END)
RETURNING id
