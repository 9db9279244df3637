-- The end of a clean stop: a row that owns nothing and names nothing is of no use. $1 executor
DELETE FROM sidings.executor e
WHERE e.id = $1 AND e.running = '{}' AND NOT EXISTS (SELECT FROM sidings.origin o WHERE o.owner = e.id)
