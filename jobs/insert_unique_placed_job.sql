-- `insert_unique_job.sql` for an origin of a topic that has grown; see `insert_placed_job.sql`.
-- $1 type, $2 origin, $3 group, $4 priority, $5 run at, $6 delay in seconds, $7 headers, $8 payload, $9 policy, $10 key of
-- the message, $11 unique key
SELECT u.id, u.origin
FROM sidings.insert_unique($1::text, sidings.place($2::text, $3::text, $10::bytea), $3::text, $4::int,
                           coalesce($5::timestamptz, clock_timestamp() + $6::float8 * interval '1 second'),
                           $7::text::jsonb, $8::text::json, $9::int, $11::text) u
