-- Many jobs of one type in the caller's transaction; their ids, in the order of the payloads: functions in one list of a
-- SELECT yield their rows side by side, in order, and positions are computed row by row above them.
-- The ids are drawn first and given back as one array: Postgres keeps all rows of a RETURNING before it sends the first.
-- Groups and payloads are a text each, because a driver encodes the texts of an array one by one. The separator stands in
-- no group and in no JSON; where the groups are null, the jobs have none.
-- JSON comes as text: a caller's connection may have a codec of its own for json. Headers are parsed once.
-- $1 type, $2 origin, $3 groups, $4 priority, $5 run at, $6 delay in seconds, $7 headers, $8 payloads, $9 policy, $10 how many
WITH new AS MATERIALIZED (
    SELECT ARRAY(SELECT nextval('sidings.job_id_seq') FROM generate_series(1, $10::int)) AS ids
), stored AS (
    INSERT INTO sidings.job (id, type, origin, "group", priority, run_at, headers, payload, policy, position)
    OVERRIDING SYSTEM VALUE
    SELECT u.id, $1, $2, u."group", $4,
           (SELECT coalesce($5::timestamptz, clock_timestamp() + $6::float8 * interval '1 second')),
           (SELECT $7::text::jsonb), u.payload::json, $9,
           CASE WHEN $5::timestamptz IS NULL AND $6::float8 IS NULL AND pg_current_xact_id() IS NOT NULL
                THEN nextval('sidings.job_position') END
    FROM (SELECT unnest((SELECT ids FROM new)) AS id, unnest(string_to_array($3::text, E'\x1f')) AS "group",
                 unnest(string_to_array($8::text, E'\x1f')) AS payload) u
)
SELECT ids FROM new
