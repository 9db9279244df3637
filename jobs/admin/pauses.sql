-- What is paused, the newest first: as many rows as persons have made.
SELECT p.type, p.origin, p."group", p.paused_by, p.reason, p.paused_at FROM sidings.pause p ORDER BY p.paused_at DESC
