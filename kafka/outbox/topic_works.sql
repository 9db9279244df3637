-- A topic works again. $1 topic, $2 relay
DELETE FROM sidings.outbox_topic WHERE topic = $1 AND relay = $2
