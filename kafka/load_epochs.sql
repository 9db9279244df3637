-- The leader's epoch of the record before each stored offset of a topic, where it is known. Index: consumer_offset_pkey.
-- $1 topic
SELECT c.partition, c.next_offset, c.leader_epoch, c.topic_id
FROM sidings.consumer_offset c
WHERE c.topic = $1 AND c.epoch_offset = c.next_offset AND c.leader_epoch IS NOT NULL AND c.topic_id IS NOT NULL
