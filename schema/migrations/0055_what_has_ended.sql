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
