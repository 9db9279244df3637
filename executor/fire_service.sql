-- Turn a tick of a periodic job, per service, into a job: the compare-and-set on its row and the INSERT are one statement,
-- so there is one job per tick, whoever tries, however often, whatever their clocks say: what is due the server decides.
-- The job goes where an earlier tick's job still is: ticks do not meet in two origins. Else to its home; else to the origin
-- of the last one while an executor has it leased; else to the first origin that is leased. A paused origin comes after all
-- others. Slots of the outbox (outbox/0 to outbox/15) are leased too, but not by executors; all else is.
-- Plan: periodic_pkey, origin_pkey; job_group in tick_waits(); of pauses there are few.
-- $1 name, $2 schedule, $3 since, $4 last tick (null: none), $5 tick, $6 home (null: none), $7 whether the tick waits
-- until an earlier job has ended, $8 payloads
WITH its AS MATERIALIZED (
    SELECT p.job_origin FROM sidings.periodic p
    WHERE p.name = $1 AND p.origin = '' AND p.schedule = $2 AND p.since = $3
      AND p.last_tick IS NOT DISTINCT FROM $4::timestamptz
    FOR UPDATE
), former AS MATERIALIZED (
    SELECT i.job_origin,
           sidings.tick_waits($1, i.job_origin) AS busy,  -- now: one may have come while the row was locked
           EXISTS (SELECT FROM sidings.origin o WHERE o.origin = i.job_origin AND o.lease_until > clock_timestamp()
                                                      AND o.origin !~ '^outbox/([0-9]|1[0-5])$') AS leased,
           (SELECT p.kind FROM sidings.pause p
            WHERE p.type = $1 OR p.origin = i.job_origin AND coalesce(p."group", $1) = $1
            ORDER BY p.kind <> 'origin' LIMIT 1) AS paused  -- what keeps its jobs from starting there
    FROM its i
), chosen AS MATERIALIZED (
    SELECT f.busy, f.leased, f.paused,
           CASE WHEN f.busy THEN f.job_origin
                WHEN $6::text IS NOT NULL THEN sidings.known_origin($1, $6::text)
                WHEN f.leased AND f.paused IS DISTINCT FROM 'origin' THEN f.job_origin
                ELSE (SELECT o.origin FROM sidings.origin o
                      LEFT JOIN sidings.pause p ON p.kind = 'origin' AND p.origin = o.origin
                      WHERE o.lease_until > clock_timestamp() AND o.origin !~ '^outbox/([0-9]|1[0-5])$'
                      ORDER BY p.origin IS NOT NULL, o.origin IS DISTINCT FROM f.job_origin, o.origin LIMIT 1) END AS origin
    FROM former f
), fired AS (
    UPDATE sidings.periodic p SET last_tick = $5, job_origin = c.origin, seen_at = clock_timestamp()
    FROM chosen c
    WHERE p.name = $1 AND p.origin = '' AND c.origin IS NOT NULL AND NOT (c.busy AND $7)
      AND $5::timestamptz <= clock_timestamp()
    RETURNING c.origin
), job AS (
    INSERT INTO sidings.job (type, origin, "group", payload)
    SELECT $1, f.origin, $1, u.payload::json FROM fired f, unnest($8::text[]) WITH ORDINALITY u (payload, number)
    ORDER BY u.number
)
SELECT clock_timestamp() AS now, f.origin AS fired, c.origin, c.busy, c.leased, c.paused
FROM (SELECT) _ LEFT JOIN chosen c ON true LEFT JOIN fired f ON true
