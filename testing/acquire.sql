-- Acquire free origins and take over expired ones; see the function for its lock order. An executor also asks on which timeline
-- (`executor/acquire_origins.sql`). $1 executor, $2 origins, $3 generation of the assignment, $4 lease, $5 whether expiry times can
-- be trusted
SELECT acquired, acquired_epoch, losses, former FROM sidings.acquire($1, $2, $3, $4, $5)
