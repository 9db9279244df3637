-- Learn how far periodic jobs have come, with the server's clock: rows are made where there are none, and the schedules of
-- this process are put into force where they should be. No tick from before a schedule came into force counts; one that
-- comes back counts from when the present one was last seen: the ticks of these minutes would be nobody's.
-- Per service the schedule of the process that started last is in force ($5), so that a rolling deployment does not go back
-- and forth; another one comes back when no process with the present one has looked for 3 minutes while this one has ($7):
-- after an outage nobody has. Who looks is seen every 92 s at least. With 50 s for 20 it would be 122, and an outage of
-- 60 s that this one has not noticed, between two looks of its own, would make it 3 minutes. Per origin it is that
-- of the holder, and counts from when the first origin had it, of those seen in the last day: for one that moves while a
-- deployment rolls, or is taken back, the ticks since then are missed ones. A row that has fired nothing yet makes up for
-- none from before the schedule that it has.
-- Rows are locked in the order of their key. Plan: periodic_pkey, driven by unnest(); where a schedule per origin changes,
-- all rows of its name, once.
-- $1 executor, $2 names, $3 origins ('' per service), $4 epochs, $5 whether this process has just started, $6 schedules,
-- $7 whether it has looked for 3 minutes without a gap
WITH mine AS MATERIALIZED (
    SELECT m.* FROM unnest($2::text[], $3::text[], $4::bigint[], $6::text[]) m (name, origin, epoch, schedule)
    WHERE m.origin = '' OR EXISTS (SELECT FROM sidings.origin o
                                   WHERE o.origin = m.origin AND o.owner = $1 AND o.epoch = m.epoch)
    ORDER BY m.name, m.origin
), stale AS MATERIALIZED (
    SELECT p.name, p.origin, m.schedule, p.schedule <> m.schedule AS changed FROM mine m
    JOIN sidings.periodic p ON p.name = m.name AND p.origin = m.origin
    WHERE CASE WHEN p.schedule = m.schedule
               THEN p.seen_at < clock_timestamp() - CASE p.origin WHEN '' THEN interval '20 s' ELSE interval '1 day' END
               ELSE p.origin <> '' OR $5 OR $7 AND p.seen_at < clock_timestamp() - interval '3 minutes' END
    ORDER BY p.name, p.origin
    FOR UPDATE OF p
), begun AS MATERIALIZED (
    SELECT x.name, x.schedule, min(x.since) AS since
    FROM (SELECT DISTINCT s.name, s.schedule FROM stale s WHERE s.changed AND s.origin <> '') c
    JOIN sidings.periodic x ON x.name = c.name AND x.schedule = c.schedule
    WHERE x.origin <> '' AND x.seen_at > clock_timestamp() - interval '25 hours'
    GROUP BY x.name, x.schedule
), seen AS (
    UPDATE sidings.periodic p
    SET seen_at = clock_timestamp(), schedule = s.schedule,
        since = CASE WHEN p.schedule = s.schedule THEN p.since
                     WHEN p.origin <> '' AND b.since IS NOT NULL
                     THEN greatest(b.since, CASE WHEN p.last_tick IS NULL THEN p.since END)
                     WHEN NOT $5 THEN p.seen_at ELSE clock_timestamp() END
    FROM stale s LEFT JOIN begun b ON b.name = s.name AND b.schedule = s.schedule
    WHERE p.name = s.name AND p.origin = s.origin
    RETURNING p.name, p.origin, p.schedule, p.since, p.last_tick
), added AS (
    INSERT INTO sidings.periodic (name, origin, schedule)
    SELECT m.name, m.origin, m.schedule FROM mine m
    WHERE NOT EXISTS (SELECT FROM sidings.periodic p WHERE p.name = m.name AND p.origin = m.origin)
    ON CONFLICT DO NOTHING
    RETURNING name, origin, schedule, since, last_tick
)
SELECT s.*, clock_timestamp() AS now FROM seen s
UNION ALL
SELECT a.*, clock_timestamp() FROM added a
UNION ALL
SELECT p.name, p.origin, p.schedule, p.since, p.last_tick, clock_timestamp()
FROM mine m JOIN sidings.periodic p ON p.name = m.name AND p.origin = m.origin
WHERE NOT EXISTS (SELECT FROM stale s WHERE s.name = p.name AND s.origin = p.origin)
