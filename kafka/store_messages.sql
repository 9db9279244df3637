-- Messages that become jobs, in the order of the arrays. One with a reason in $4 is held: it waits for a person, outside
-- of its group's order, so it gets no position. CASE takes the transaction id before nextval() runs, as in insert_job.
-- In a topic that has grown, they go where their group has jobs already; only there are the keys given.
-- $1 type, $2 origins, $3 groups, $4 reasons, $5 payloads, $6 headers, $7 keys, or null
INSERT INTO sidings.job (type, origin, "group", held, headers, payload, position)
SELECT $1, CASE WHEN $7::bytea[] IS NULL THEN m.origin ELSE sidings.place(m.origin, m."group", m.key) END, m."group",
       m.held, m.headers::jsonb, m.payload,
       CASE WHEN m.held IS NULL AND pg_current_xact_id() IS NOT NULL THEN nextval('sidings.job_position') END
FROM unnest($2::text[], $3::text[], $4::text[], $5::json[], $6::text[], $7::bytea[])
     AS m (origin, "group", held, payload, headers, key)
RETURNING origin
