-- Those of the days $1 of which the history has no row, in order. Of days without a partition: each look reads the default one alone.
-- Plan: no EXISTS, which becomes a join that reads all partitions; of the subquery's Append they are removed as it runs.
SELECT day FROM unnest($1::date[]) AS day
WHERE (SELECT true FROM sidings.job_history h
       WHERE h.finished_at >= day::timestamp AT TIME ZONE 'UTC' AND h.finished_at < (day + 1)::timestamp AT TIME ZONE 'UTC'
       LIMIT 1) IS NULL
ORDER BY day
