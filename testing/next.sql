-- The jobs that run next: the highest priority, then by position; of a group only its first. What is paused stays, and what
-- stands behind it in its group. $1 known types, $2 origins, $3 how many
SELECT j.id, j.type, j.origin, j."group", j.position, j.attempt, j.failures, j.losses, j.priority, j.policy, j.headers::text AS headers,
       j.payload::text AS payload, date_part('epoch', j.enqueued_at) AS enqueued,
       date_part('epoch', clock_timestamp() - j.run_at) AS overdue,
       date_part('epoch', clock_timestamp() - j.first_started_at) AS since_first
FROM sidings.job j
WHERE j.position IS NOT NULL AND (j.run_at IS NULL OR j.run_at <= clock_timestamp())
  AND j.type = ANY ($1::text[]) AND j.origin = ANY ($2::text[])
  AND (j.policy = 2   -- parallel
       OR NOT EXISTS (SELECT FROM sidings.job before
                      WHERE before.origin = j.origin AND before."group" = j."group" AND before.policy <> 2
                        AND before.position < j.position))
  AND NOT EXISTS (SELECT FROM sidings.pause p
                  WHERE p.type = j.type OR (p.origin = j.origin AND (p."group" IS NULL OR p."group" = j."group")))
ORDER BY j.priority DESC, j.position
LIMIT $3
