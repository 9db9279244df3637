-- Acquire free slots and take over expired ones, and tell whose answer this is: a former primary may live on.
-- $1 relay, $2 origins, $3 lease
SELECT a.acquired, a.acquired_epoch, sidings.timeline() AS timeline FROM sidings.acquire($1, $2, 0, $3, true) a
