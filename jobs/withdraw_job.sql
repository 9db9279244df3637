-- A delayed job that has never run goes, in the caller's transaction, with its terminal row of the history.
-- No lease is asked for: without a position no reader has seen it, and promotion, which gives it one, locks its row first and
-- looks again (executor/promote.sql), as this does after a wait for that. So either promotion finds no row, or this finds a position.
-- Until the caller commits promotion passes the row over (SKIP LOCKED), with what is due after it in its group; cycles, reads and
-- takeovers never touch a delayed row. attempt: a job without a group that has failed is delayed again; it has begun.
-- Plan: job_pkey, once job_unique_key has given the id. num_nonnulls(), because "IS NULL AND IS NULL" would let the planner go
-- through all of job_due.
-- $1 type, $2 id, or $3 key, $4 whether it leaves history
WITH gone AS (
    DELETE FROM sidings.job j
    WHERE j.id = coalesce($2::bigint, (SELECT k.id FROM sidings.job k WHERE k.type = $1::text AND k.unique_key = $3::text))
      AND j.type = $1::text AND num_nonnulls(j.position, j.held) = 0 AND j.attempt = 1
    RETURNING j.*
), history AS (
    INSERT INTO sidings.job_history
        (job_id, enqueued_at, due_at, finished_at, attempt, outcome, priority, type, origin, "group", error_class, error_message,
         correlation_id, payload)
    SELECT g.id, g.enqueued_at, g.run_at, clock_timestamp(), g.attempt, 'cancelled', g.priority, g.type, g.origin, g."group",
           'Cancelled', 'withdrawn in a transaction of the application', g.headers ->> 'correlation_id',
           coalesce(g.payload, 'null')   -- without any it is erased, and not requeued
    FROM gone g WHERE $4::boolean
)
SELECT g.id, g.origin FROM gone g
