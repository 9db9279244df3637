-- How many jobs there are, by what was asked for. Reads every row once (or those of one origin) and hashes: no sort.
-- $1 by state, $2 by type, $3 by origin, $4 origin or null, $5 type or null
SELECT CASE WHEN $1::boolean THEN v.state END AS state, CASE WHEN $2::boolean THEN v.type END AS type,
       CASE WHEN $3::boolean THEN v.origin END AS origin, count(*) AS jobs, min(v.enqueued_at) AS oldest
FROM sidings.job_overview v
WHERE ($4::text IS NULL OR v.origin = $4) AND ($5::text IS NULL OR v.type = $5)
GROUP BY 1, 2, 3
