-- runs with 0051
--
-- As in 0062, but who waits for an origin that another executor holds leaves its row alone: it looks first, without a lock, and
-- writes at most one wish per half of a lease. Two instances with the same static assignment are of one generation, and the one
-- that waits asks ten times a second, for as long as they live: each time it locked, and wrote anew, the row of each origin,
-- which is gigabytes of WAL a day and, beside a long transaction, versions that no renewal gets past. So a wish that stands gives
-- way to a newer generation only, at once; its own writer prolongs it in time, and others of that generation wait until it has
-- run out.
CREATE OR REPLACE FUNCTION sidings.acquire(me uuid, wanted text[], generation bigint, lease interval, trust_expiry boolean)
RETURNS TABLE (acquired text, acquired_epoch bigint, losses bigint, former uuid)
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    o     record;
    ids   bigint[];
    first bigint;  -- epoch of this timeline
    ours  text[];
    at    constant timestamptz := clock_timestamp();  -- of before the locks: what had run out by then has
    place tid;
BEGIN
    INSERT INTO sidings.origin (origin)
    SELECT w FROM unnest(wanted) w
    WHERE NOT EXISTS (SELECT FROM sidings.origin x WHERE x.origin = w)
    ORDER BY w
    ON CONFLICT DO NOTHING;

    first := (('x' || sidings.timeline())::bit(32)::bigint - 1) * 1000000000;
    trust_expiry := trust_expiry AND pg_postmaster_start_time() + lease < at;
    -- Those to take, and those that lack our wish. A row that has changed since the snapshot is looked at again once it is locked.
    ours := ARRAY(SELECT x.origin FROM sidings.origin x
                  WHERE x.origin = ANY (wanted)
                        AND (x.owner IS NULL OR x.owner = me OR (trust_expiry AND x.lease_until < at)
                             OR x.wanted_until IS NULL OR x.wanted_until < at OR x.wanted_generation < generation
                             OR (x.wanted_by = me AND x.wanted_generation = generation AND x.wanted_until < at + lease / 2))
                  ORDER BY x.origin FOR UPDATE SKIP LOCKED);
    PERFORM sidings.lock_executor(f.owner)   -- waits for their cycles in flight
    FROM (SELECT DISTINCT x.owner FROM sidings.origin x
          WHERE trust_expiry AND x.origin = ANY (ours) AND x.owner <> me AND x.lease_until < at ORDER BY x.owner) f;
    FOR o IN SELECT * FROM sidings.origin x WHERE x.origin = ANY (ours) ORDER BY x.origin
    LOOP
        IF o.owner IS NULL OR o.owner = me OR (trust_expiry AND o.lease_until < at) THEN
            ids := '{}';
            IF o.owner IS NOT NULL AND o.owner <> me THEN
                place := sidings.lock_executor(o.owner);
                WITH cut AS (
                    UPDATE sidings.job j
                    SET losses = LEAST(j.losses + 1, 32767), attempt = j.attempt + 1
                    FROM sidings.executor e, unnest(e.running) r (id)
                    WHERE e.ctid = place AND j.id = r.id AND j.origin = o.origin
                    RETURNING j.*
                ), recorded AS (
                    INSERT INTO sidings.job_history (job_id, epoch, enqueued_at, due_at, finished_at, executor, attempt,
                                                     outcome, priority, type, origin, "group", correlation_id)
                    SELECT c.id, o.epoch, c.enqueued_at, c.run_at, clock_timestamp(), o.owner, c.attempt - 1,
                           'lost', c.priority, c.type, c.origin, c."group", c.headers ->> 'correlation_id'
                    FROM cut c
                )
                SELECT coalesce(array_agg(c.id), '{}') INTO ids FROM cut c;
                UPDATE sidings.executor e
                SET fence = e.fence + 1, running = ARRAY(SELECT r FROM unnest(e.running) r WHERE r <> ALL (ids))
                WHERE e.ctid = place;
            END IF;
            UPDATE sidings.origin x
            SET owner = me, epoch = GREATEST(x.epoch + 1, first), lease_until = clock_timestamp() + lease,
                wanted_by = NULL, wanted_until = NULL, wanted_generation = NULL
            WHERE x.origin = o.origin
            RETURNING x.epoch INTO acquired_epoch;
            acquired := o.origin;
            losses := cardinality(ids);
            former := o.owner;
            RETURN NEXT;
        ELSE
            UPDATE sidings.origin x
            SET wanted_by = me, wanted_generation = generation, wanted_until = clock_timestamp() + lease
            WHERE x.origin = o.origin;
        END IF;
    END LOOP;
END $$;
