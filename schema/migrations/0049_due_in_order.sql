-- Delayed jobs that are due at the same moment are promoted in the order in which they were enqueued.
-- runs with 0019

DROP INDEX sidings.job_due;
-- Promotion of delayed jobs in due order. Without the id each statement would sort all that are due at one moment for its thousand.
CREATE INDEX job_due ON sidings.job (origin, run_at, id) WHERE position IS NULL AND held IS NULL;
