-- The youngest message of a topic that is parked. $1 topic
SELECT max(id) AS id FROM sidings.outbox_parked WHERE topic = $1
