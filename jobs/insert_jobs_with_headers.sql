-- `insert_jobs.sql` where each job has headers of its own: one text for all, in which those of a job without any are empty.
-- Where all are, or it is shorter, what lacks is null.
-- $1 type, $2 origin, $3 groups, $4 priority, $5 run at, $6 delay in seconds, $7 headers of each, $8 payloads, $9 policy,
-- $10 how many
WITH new AS MATERIALIZED (
    SELECT ARRAY(SELECT nextval('sidings.job_id_seq') FROM generate_series(1, $10::int)) AS ids
), stored AS (
    INSERT INTO sidings.job (id, type, origin, "group", priority, run_at, headers, payload, policy, position)
    OVERRIDING SYSTEM VALUE
    SELECT u.id, $1, $2, u."group", $4,
           (SELECT coalesce($5::timestamptz, clock_timestamp() + $6::float8 * interval '1 second')),
           u.headers::jsonb, u.payload::json, $9,
           CASE WHEN $5::timestamptz IS NULL AND $6::float8 IS NULL AND pg_current_xact_id() IS NOT NULL
                THEN nextval('sidings.job_position') END
    FROM (SELECT unnest((SELECT ids FROM new)) AS id, unnest(string_to_array($3::text, E'\x1f')) AS "group",
                 unnest(string_to_array($7::text, E'\x1f', '')) AS headers,
                 unnest(string_to_array($8::text, E'\x1f')) AS payload) u
)
SELECT ids FROM new
