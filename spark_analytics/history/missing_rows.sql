-- How many of some attempts of a file one day's partition, or the history, whose name stands for {partition}, has not. $1 their jobs,
-- $2 numbers, $3 ends, $4 the first of these, $5 the last: a file has its rows nearly in that order, so that each look reads a piece of
-- the partition. No temporary table: a role may own the history, and not have the right to make one.
-- Plan: the BRIN index on finished_at, and a hash.
SELECT count(*) FROM unnest($1::bigint[], $2::int[], $3::timestamptz[]) AS f (job_id, attempt, finished_at)
WHERE NOT EXISTS (SELECT FROM sidings.{partition} h
                  WHERE h.job_id = f.job_id AND h.attempt = f.attempt AND h.finished_at = f.finished_at
                    AND h.finished_at BETWEEN $4 AND $5)
