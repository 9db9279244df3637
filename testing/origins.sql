-- The origins that have jobs to run.
SELECT DISTINCT j.origin FROM sidings.job j WHERE j.held IS NULL ORDER BY j.origin
