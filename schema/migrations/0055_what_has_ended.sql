-- runs with 0051
--
-- What is said of jobs that are no more. Each function is written out once more; what has changed stands above it.

-- As before, but an attempt that ends no job is not told as its end: of a type with history=False the last that is recorded
-- may be a lost one, though the job ran well behind it.
CREATE OR REPLACE FUNCTION sidings.no_such_job(job bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    last record;
    at   text;
BEGIN
    SELECT h.outcome, h.finished_at INTO last FROM sidings.job_history h
    WHERE h.job_id = job ORDER BY h.attempt DESC, h.finished_at DESC LIMIT 1;
    at := to_char(last.finished_at, 'YYYY-MM-DD HH24:MI:SS OF');
    IF EXISTS (SELECT FROM sidings.job j WHERE j.id = job) THEN
        RAISE EXCEPTION USING ERRCODE = 'lock_not_available', MESSAGE = format('job %s has just been moved to another origin', job),
            HINT = 'Try again.';
    ELSIF last.outcome IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'SD003', MESSAGE = format('there is no job %s, and the history knows of none', job),
            HINT = 'Check the number. The history keeps what history_days says, and nothing of types with history=False that ran well.';
    ELSIF last.outcome NOT IN ('succeeded', 'discarded', 'cancelled', 'superseded') THEN
        RAISE EXCEPTION USING ERRCODE = 'SD003',
            MESSAGE = format('there is no job %s any more; its last attempt on record was %s at %s', job, last.outcome, at),
            HINT = 'A type with history=False leaves no record of what succeeds or is superseded.';
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'SD003', MESSAGE = format('there is no job %s any more: %s at %s', job, last.outcome, at),
        HINT = 'A job that was discarded, cancelled or superseded can be requeued.';
END $$;

-- As before, but of a job that was stored without a payload (sidings.enqueue('rebuild', NULL, …), a job of None) null is kept.
-- No payload at all is what somebody has erased, and is not requeued.
CREATE OR REPLACE FUNCTION sidings.end_jobs(ids bigint[], its_outcome sidings.outcome, actor text, reason text, its_owner uuid,
                                 its_epoch bigint, running bigint[]) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    ended bigint;
BEGIN
    WITH gone AS (
        DELETE FROM sidings.job j WHERE j.id = ANY (ids) RETURNING j.*
    ), recorded AS (
        INSERT INTO sidings.job_history (job_id, epoch, enqueued_at, due_at, finished_at, executor, attempt, outcome, priority,
                                         type, origin, "group", error_class, error_message, correlation_id, payload)
        SELECT g.id, CASE WHEN g.id = ANY (running) THEN its_epoch END, g.enqueued_at, g.run_at, clock_timestamp(),
               CASE WHEN g.id = ANY (running) THEN its_owner END, g.attempt, its_outcome, g.priority, g.type, g.origin,
               g."group", initcap(its_outcome::text), concat_ws(': ', 'by ' || actor, reason),
               g.headers ->> 'correlation_id', coalesce(g.payload, 'null')
        FROM gone g
        RETURNING 1
    )
    SELECT count(*) INTO ended FROM recorded;
    RETURN ended;
END $$;
