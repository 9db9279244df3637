-- Of which of these topics any offset is stored. Index: consumer_offset_pkey, one probe each.
-- $1 topics
SELECT t.topic FROM unnest($1::text[]) AS t (topic)
WHERE EXISTS (SELECT FROM sidings.consumer_offset c WHERE c.topic = t.topic)
