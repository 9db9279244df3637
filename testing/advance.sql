-- Time passes: everything that is stored of the jobs lies $1 seconds further in the past. So every clock stays right.
UPDATE sidings.job
SET run_at = run_at - $1::float8 * interval '1 second',
    enqueued_at = enqueued_at - $1::float8 * interval '1 second',
    first_started_at = first_started_at - $1::float8 * interval '1 second'
