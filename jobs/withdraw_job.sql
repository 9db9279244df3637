-- Whether a delayed job has been taken back: see sidings.withdraw().
-- $1 type, $2 id, or $3 key, $4 whether it leaves history
SELECT sidings.withdraw($1::text, $2::bigint, $3::text, $4::boolean)
