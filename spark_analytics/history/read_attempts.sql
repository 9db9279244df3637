-- What Spark reads of the history, an attempt a row. Times go as microseconds since 1970, for JDBC takes three times as long to make
-- its own timestamps of them: float8 holds today's seconds to a quarter of a microsecond. `ready` is when the attempt could start.
-- An infinite due time is that of a job that waited for a person. `at` is for the conditions of slices: the bare column, so that days
-- are pruned and BRIN is used.
SELECT job_id, attempt, type, origin, "group", outcome::text AS outcome,
       round(date_part('epoch', enqueued_at) * 1e6)::bigint AS enqueued,
       round(date_part('epoch', greatest(enqueued_at, CASE WHEN isfinite(due_at) THEN due_at END)) * 1e6)::bigint AS ready,
       round(date_part('epoch', started_at) * 1e6)::bigint AS started,
       round(date_part('epoch', finished_at) * 1e6)::bigint AS finished,
       error_class, left(error_message, 500) AS error_message, error_fingerprint, finished_at AS at
FROM sidings.job_history
