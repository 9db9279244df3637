-- The topics that cannot be sent to at present, the worst first. A topic stands here once for each relay that fails with it.
SELECT t.topic, t.error, t.retries, t.retry_at, t.failing_since, t.relay, r.host, r.pid
FROM sidings.outbox_topic t JOIN sidings.outbox_relay r ON r.id = t.relay
ORDER BY t.failing_since, t.topic, t.relay
