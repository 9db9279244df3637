-- Seconds until something becomes due that is not yet, and is not paused; null when nothing will. $1 known types
SELECT date_part('epoch', min(j.run_at) - clock_timestamp())
FROM sidings.job j
WHERE j.held IS NULL AND j.run_at > clock_timestamp() AND isfinite(j.run_at) AND j.type = ANY ($1::text[])
  AND NOT EXISTS (SELECT FROM sidings.pause p
                  WHERE p.type = j.type OR (p.origin = j.origin AND (p."group" IS NULL OR p."group" = j."group")))
