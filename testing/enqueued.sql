-- Payloads of the jobs of one type, by position, in which those of a group run; delayed ones last. Priorities, which
-- count between groups only, are left out.
-- $1 type, $2 origin or null: any, $3 whether the group counts, $4 group
SELECT j.payload::text FROM sidings.job j
WHERE j.type = $1 AND ($2::text IS NULL OR j.origin = $2) AND (NOT $3::boolean OR j."group" IS NOT DISTINCT FROM $4)
ORDER BY j.position NULLS LAST, j.run_at, j.id
