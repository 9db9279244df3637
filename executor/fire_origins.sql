-- Turn ticks of a periodic job of every origin into jobs; see fire_service.sql. Only the holder may: the key-share lock on
-- (origin, owner, epoch) keeps a superseded one out. Returns a row per origin that it holds.
-- Lock order: origins by name, then rows of periodic. Plan: origin_pkey, periodic_pkey, job_group, driven by unnest().
-- $1 executor, $2 name, $3 schedule, $4 origins, $5 epochs, $6 since, $7 last ticks (null: none), $8 ticks, $9 whether a tick
-- waits until an earlier job has ended, $10 the jobs' origins, $11 their payloads
WITH mine AS MATERIALIZED (
    SELECT o.origin, m.since, m.last_tick, m.tick
    FROM unnest($4::text[], $5::bigint[], $6::timestamptz[], $7::timestamptz[], $8::timestamptz[])
             m (origin, epoch, since, last_tick, tick)
    JOIN sidings.origin o ON o.origin = m.origin AND o.epoch = m.epoch AND o.owner = $1
    ORDER BY o.origin
    FOR KEY SHARE OF o
), busy AS MATERIALIZED (
    SELECT m.origin FROM mine m
    WHERE EXISTS (SELECT FROM sidings.job j WHERE j.origin = m.origin AND j."group" = $2 AND j.type = $2 AND j.held IS NULL)
), fired AS (
    UPDATE sidings.periodic p SET last_tick = m.tick, job_origin = m.origin, seen_at = clock_timestamp()
    FROM mine m
    WHERE p.name = $2 AND p.origin = m.origin AND p.schedule = $3 AND p.since = m.since
      AND p.last_tick IS NOT DISTINCT FROM m.last_tick AND m.tick <= clock_timestamp()
      AND NOT ($9 AND EXISTS (SELECT FROM busy b WHERE b.origin = m.origin))
    RETURNING p.origin
), job AS (
    INSERT INTO sidings.job (type, origin, "group", payload)
    SELECT $2, f.origin, $2, u.payload::json
    FROM unnest($10::text[], $11::text[]) WITH ORDINALITY u (origin, payload, number) JOIN fired f ON f.origin = u.origin
    ORDER BY u.number
)
SELECT clock_timestamp() AS now, m.origin, f.origin IS NOT NULL AS fired, b.origin IS NOT NULL AS busy
FROM mine m LEFT JOIN fired f ON f.origin = m.origin LEFT JOIN busy b ON b.origin = m.origin
