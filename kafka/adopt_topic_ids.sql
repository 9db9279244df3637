-- Which topic an offset belongs to, so that another one of its name is told from it: once for each row, by whoever places the
-- partition first. A null comes of a new row, of an earlier release, and of a person to whom the topic of now is right: its leaders
-- have epochs of their own.
-- In order, so that two instances cannot deadlock. Index: consumer_offset_pkey.
-- $1 topics, $2 partitions, $3 the topics' ids
UPDATE sidings.consumer_offset c
SET topic_id = a.topic_id, leader_epoch = NULL
FROM unnest($1::text[], $2::int[], $3::uuid[]) AS a (topic, partition, topic_id)
WHERE c.topic = a.topic AND c.partition = a.partition AND c.topic_id IS NULL
