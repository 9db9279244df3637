-- What is paused, the newest first: as many rows as persons have made.
SELECT p.type, p.origin, p."group", NULL AS topic, p.paused_by, p.reason, p.paused_at FROM sidings.pause p
UNION ALL
SELECT NULL, NULL, NULL, p.topic, p.paused_by, p.reason, p.paused_at FROM sidings.topic_pause p
ORDER BY paused_at DESC
