-- Try a failing topic again now instead of when its backoff ends: its relays see it at their next heartbeat. $1 topic
UPDATE sidings.outbox_topic SET retry_at = clock_timestamp() WHERE topic = $1 RETURNING topic
