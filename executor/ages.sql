-- How long the first job in each origin's order has waited, and how many jobs are held there. A failing job has waited since
-- its first failure: its run_at, which moves on with every attempt, would hide for how long its group has been stuck.
-- $1 origins
-- Plan: the first entry of job_scan per origin; job_held.
SELECT o.origin,
       (SELECT greatest(0, date_part('epoch', clock_timestamp()
                                         - coalesce(j.first_started_at, greatest(j.enqueued_at, j.run_at))))
        FROM sidings.job j
        WHERE j.origin = o.origin AND j.position IS NOT NULL ORDER BY j.position LIMIT 1) AS age,
       (SELECT count(*) FROM sidings.job j WHERE j.origin = o.origin AND j.held IS NOT NULL) AS held
FROM unnest($1::text[]) AS o (origin)
