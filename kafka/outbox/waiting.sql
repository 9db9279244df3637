-- How much waits in these slots, and for how long, by topic. Reads all of it: asked seldom, and more seldom when it takes
-- long. $1 slots, $2 whether only one relay at a time may count such ones: of who finds another at it nothing is read, and
-- one row without a topic says so.
WITH turn AS MATERIALIZED (
    SELECT NOT $2::boolean OR pg_try_advisory_xact_lock(hashtextextended('sidings.outbox_waiting', 0)) AS ours
)
SELECT m.topic, count(*) AS waiting, date_part('epoch', clock_timestamp() - min(m.published_at)) AS oldest
FROM sidings.outbox m WHERE (SELECT t.ours FROM turn t) AND m.slot = ANY ($1::smallint[]) GROUP BY m.topic
UNION ALL
SELECT NULL, NULL, NULL FROM turn t WHERE NOT t.ours
