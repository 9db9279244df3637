-- How many jobs wait for a person in these origins: held ones, and blocked ones. Reads all of them: asked more seldom when it takes long.
-- $1 origins
-- Plan: job_held, job_blocked; not job_backoff, which has what is blocked in all origins.
SELECT (SELECT count(*) FROM sidings.job j WHERE j.origin = ANY ($1) AND j.held IS NOT NULL) AS held,
       (SELECT count(*) FROM sidings.job j WHERE j.run_at = 'infinity' AND j.position IS NOT NULL
        AND (j.attempt > 1 OR j.failures > 0) AND j.origin = ANY ($1)) AS blocked
