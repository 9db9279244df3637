-- The migrations that this schema has seen.
SELECT m.version, m.name, m.applied_at FROM sidings.migration m ORDER BY m.version
