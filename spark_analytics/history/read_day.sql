-- All rows of one day's partition, whose name stands for {partition}. An infinite due time, of a job that waited for a person, is none.
SELECT job_id, epoch, enqueued_at, CASE WHEN isfinite(due_at) THEN due_at END AS due_at, started_at, finished_at, executor::text,
       attempt, outcome::text, priority, type, origin, "group", error_class, error_message, error_fingerprint, correlation_id,
       payload::text
FROM sidings.{partition}
