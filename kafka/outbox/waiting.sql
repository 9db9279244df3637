-- How much waits in these slots, and for how long, by topic. Reads all of it: asked seldom, and more seldom when it takes
-- long. $1 slots
SELECT m.topic, count(*) AS waiting, date_part('epoch', clock_timestamp() - min(m.published_at)) AS oldest
FROM sidings.outbox m WHERE m.slot = ANY ($1::smallint[]) GROUP BY m.topic
