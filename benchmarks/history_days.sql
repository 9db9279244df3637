-- The attempts of the day $1 once more, $2 days earlier, as those of other jobs ($3 is added to their numbers).
INSERT INTO sidings.job_history
SELECT job_id + $3, epoch, enqueued_at - $2 * interval '1 day', due_at - $2 * interval '1 day', started_at - $2 * interval '1 day',
       finished_at - $2 * interval '1 day', executor, attempt, outcome, priority, type, origin, "group", error_class, error_message,
       error_fingerprint, correlation_id, payload
FROM sidings.job_history
WHERE finished_at >= $1::date::timestamp AT TIME ZONE 'UTC' AND finished_at < ($1::date + 1)::timestamp AT TIME ZONE 'UTC'
