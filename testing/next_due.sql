-- Seconds until something becomes due that is not yet; null when nothing will. $1 known types
SELECT date_part('epoch', min(j.run_at) - clock_timestamp())
FROM sidings.job j
WHERE j.held IS NULL AND j.run_at > clock_timestamp() AND isfinite(j.run_at) AND j.type = ANY ($1::text[])
