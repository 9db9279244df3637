-- runs with 0051
--
-- `SELECT sidings.withdraw(…)`: a delayed job is taken back, from SQL, triggers and other languages, and by JobType.withdraw.
--
-- A delayed job that has never run goes, in the caller's transaction, with its terminal row of the history.
-- No lease is asked for: without a position no reader has seen it, and promotion, which gives it one, locks its row first and
-- looks again (executor/promote.sql), as this does after a wait for that. So either promotion finds no row, or this finds a position.
-- Until the caller commits promotion passes the row over (SKIP LOCKED), with what is due after it in its group; cycles, reads and
-- takeovers never touch a delayed row. attempt: a job without a group that has failed is delayed again; it has begun.
--
--   type        of the job: the name of its handler
--   job_id      what sidings.enqueue() has returned; or
--   unique_key  the job's, instead of it
--   history     false for a type with `history=False`: then none is left
--
-- Returns whether there was such a job, of this type, whose time has not come; else nothing has changed. What can name no job is
-- refused with SQLSTATE 22023 and a hint.
--
-- Plan: job_pkey, once job_unique_key has given the id, whatever the session has planned while the table was small: hence the
-- settings, as of sidings.insert_unique(). num_nonnulls(), because "IS NULL AND IS NULL" would let the planner go through all of
-- job_due.
CREATE FUNCTION sidings.withdraw(
    type       text,
    job_id     bigint DEFAULT NULL,
    unique_key text DEFAULT NULL,
    history    boolean DEFAULT true
) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off SET jit = off AS $$
DECLARE
    problem text;
    remedy  text;
    gone_id bigint;
BEGIN
    CASE
        WHEN type IS NULL OR type = '' THEN
            problem := 'the job to be withdrawn has no type';
            remedy := 'Give the name of its handler, e.g. ''remind''.';
        WHEN num_nonnulls(job_id, unique_key) = 0 THEN
            problem := format('of the job %L to be withdrawn neither job_id nor unique_key is given', type);
            remedy := 'Give one of them.';
        WHEN num_nonnulls(job_id, unique_key) = 2 THEN
            problem := format('of the job %L to be withdrawn both job_id and unique_key are given', type);
            remedy := 'Give one of them.';
        WHEN unique_key = '' THEN
            problem := format('the unique_key of the job %L is empty', type);
            remedy := 'Give the one that it was enqueued with.';
        WHEN history IS NULL THEN
            problem := format('history is NULL for the job %L', type);
            remedy := 'Give true, or false if its type has history=False.';
        ELSE
            WITH gone AS (
                DELETE FROM sidings.job j
                WHERE j.id = coalesce(withdraw.job_id, (SELECT k.id FROM sidings.job k
                                                        WHERE k.type = withdraw.type AND k.unique_key = withdraw.unique_key))
                  AND j.type = withdraw.type AND num_nonnulls(j.position, j.held) = 0 AND j.attempt = 1
                RETURNING j.*
            ), told AS (
                INSERT INTO sidings.job_history
                    (job_id, enqueued_at, due_at, finished_at, attempt, outcome, priority, type, origin, "group", error_class,
                     error_message, correlation_id, payload)
                SELECT g.id, g.enqueued_at, g.run_at, clock_timestamp(), g.attempt, 'cancelled', g.priority, g.type, g.origin,
                       g."group", 'Cancelled', 'withdrawn in a transaction of the application', g.headers ->> 'correlation_id',
                       coalesce(g.payload, 'null')   -- without any it is erased, and not requeued
                FROM gone g WHERE withdraw.history
            )
            SELECT g.id INTO gone_id FROM gone g;
            RETURN FOUND;
    END CASE;
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = problem, HINT = remedy;
END $$;
