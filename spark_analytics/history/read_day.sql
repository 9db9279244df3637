-- All rows of one day's partition, whose name stands for {partition}. An infinite due time, of a job that waited for a person, is none;
-- SQL can give one that no datetime of Python's is: it is the last, or the first, that is one.
SELECT job_id, epoch, enqueued_at,
       CASE WHEN due_at < 'infinity' THEN greatest(least(due_at, '9999-12-30Z'), '0001-01-03Z') END AS due_at,
       started_at, finished_at, executor::text,
       attempt, outcome::text, priority, type, origin, "group", error_class, error_message, error_fingerprint, correlation_id,
       payload::text, headers::text
FROM sidings.{partition}
