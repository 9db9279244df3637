-- The last error of jobs whose row has none, as of those that were only snoozed. Plan: job_history_job (BRIN) of each partition.
-- $1 ids
SELECT DISTINCT ON (h.job_id) h.job_id, concat_ws(': ', h.error_class, h.error_message) AS error
FROM sidings.job_history h WHERE h.job_id = ANY ($1::bigint[]) AND h.error_class IS NOT NULL
ORDER BY h.job_id, h.finished_at DESC
