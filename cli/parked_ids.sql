-- Which messages of a topic are parked. $1 topic
SELECT m.id FROM sidings.outbox_parked m WHERE m.topic = $1 ORDER BY m.id
