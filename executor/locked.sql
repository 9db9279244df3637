-- Which of these jobs are locked by somebody else's transaction right now. $1 ids
SELECT j.id FROM sidings.job j
WHERE j.id = ANY ($1) AND j.id NOT IN (SELECT k.id FROM sidings.job k WHERE k.id = ANY ($1) FOR UPDATE SKIP LOCKED)
