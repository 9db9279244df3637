-- `insert_unique_job.sql` for a type that has a home; see `insert_home_job.sql`.
-- $1 type, $2 topic, $3 group, $4 priority, $5 run at, $6 delay in seconds, $7 headers, $8 payload, $9 policy, $10 key
SELECT u.id, u.origin
FROM sidings.home_origin($3::text, $2::text) AS h (origin),
     sidings.insert_unique($1::text, h.origin, $3::text, $4::int,
                           coalesce($5::timestamptz, clock_timestamp() + $6::float8 * interval '1 second'),
                           $7::text::jsonb, $8::text::json, $9::int, $10::text) u
WHERE h.origin IS NOT NULL
