-- One page of the slow audit: committed, waiting jobs of one origin from a position on. What the scheduler neither has nor is
-- going to read by itself is a defect, and counted. $1 origin, $2 after, $3 page, $4 up to: the origin's mark
SELECT j.id, j."group", j.position, j.type FROM sidings.job j
WHERE j.origin = $1 AND j.position > $2 AND j.position <= $4 ORDER BY j.position LIMIT $3
