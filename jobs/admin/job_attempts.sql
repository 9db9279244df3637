-- All attempts of one job, oldest first. Plan: job_history_job (BRIN) of each partition. $1 id
SELECT h.job_id, h.type, h.origin, h."group", h.attempt, h.outcome::text AS outcome, h.enqueued_at,
       CASE WHEN h.due_at < 'infinity' THEN greatest(least(h.due_at, '9999-12-30Z'), '0001-01-03Z') END AS due_at,
       h.started_at, h.finished_at,
       h.executor, h.epoch, h.error_class, h.error_message, h.correlation_id,
       h.headers::text AS headers, h.payload::text AS payload
FROM sidings.job_history h WHERE h.job_id = $1 ORDER BY h.attempt, h.finished_at
