-- How long the first job in each origin's order has waited. A failing job has waited since its first failure: its run_at,
-- which moves on with every attempt, would hide for how long its group has been stuck. One that is put off attempt after attempt,
-- and has never failed, would hide in the same way what waits behind it: it is passed over, until it has been due for ten minutes.
-- Where 10,000 are, the next look goes on at the last of them.
-- $1 origins, $2 where to begin: before that the last look has found nothing. There are only dead entries, which stay for as long as
-- anybody's transaction is open, and a look would step over all of them.
-- Plan: entries of job_scan per origin, from there on, up to the first that counts: nearly always one.
SELECT o.origin, f.position AS first,
       greatest(0, date_part('epoch', clock_timestamp()
                                      - coalesce(f.first_started_at, greatest(f.enqueued_at, f.run_at)))) AS age
FROM unnest($1::text[], $2::bigint[]) AS o (origin, begin)
LEFT JOIN LATERAL (SELECT * FROM (SELECT *, row_number() OVER (ORDER BY j.position) AS number
                                  FROM (SELECT * FROM sidings.job j
                                        WHERE j.origin = o.origin AND j.position >= o.begin ORDER BY j.position LIMIT 10000) j) j
                   WHERE (j.attempt > 1 AND j.failures = 0 AND j.run_at > clock_timestamp() - interval '10 minutes') IS NOT TRUE
                         OR j.number = 10000
                   ORDER BY j.position LIMIT 1) f ON true
