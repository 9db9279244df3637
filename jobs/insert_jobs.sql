-- Many jobs of one type in the caller's transaction, in the order of the payloads: both functions yield their rows in
-- order, and position and id are computed row by row above them.
-- The groups are one text and the payloads are another, because a driver encodes the texts of an array one by one. No
-- group holds the separator; where they are null, the jobs have none.
-- JSON comes as text: a caller's connection may have a codec of its own for json.
-- $1 type, $2 origin, $3 groups, $4 priority, $5 run at, $6 delay in seconds, $7 headers, $8 array of payloads, $9 policy
INSERT INTO sidings.job (type, origin, "group", priority, run_at, headers, payload, policy, position)
SELECT $1, $2, u."group", $4, coalesce($5::timestamptz, clock_timestamp() + $6::float8 * interval '1 second'),
       $7::text::jsonb, u.payload, $9,
       CASE WHEN $5::timestamptz IS NULL AND $6::float8 IS NULL AND pg_current_xact_id() IS NOT NULL
            THEN nextval('sidings.job_position') END
FROM ROWS FROM (unnest(string_to_array($3::text, E'\x1f')), json_array_elements($8::text::json)) AS u ("group", payload)
RETURNING id
