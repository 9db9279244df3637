-- How many messages wait and are parked, by topic, and since when. Reads all of the outbox, as the relays' own count does
-- (waiting.sql), but once: it is asked for by a person.
SELECT coalesce(w.topic, p.topic) AS topic, coalesce(w.waiting, 0) AS waiting, w.oldest, coalesce(p.parked, 0) AS parked
FROM (SELECT m.topic, count(*) AS waiting, min(m.published_at) AS oldest FROM sidings.outbox m GROUP BY m.topic) w
FULL JOIN (SELECT m.topic, count(*) AS parked FROM sidings.outbox_parked m GROUP BY m.topic) p ON p.topic = w.topic
ORDER BY 1
