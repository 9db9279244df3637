-- A failover may have lost acquisitions. What is free on the new server may be another's, who runs jobs under a lease that got lost.
-- runs with 0019

-- The timeline that this database is known to be on, and since when, so that also an executor that starts just after a promotion knows of
-- it. Who acquires notes another one that it finds (executor/acquire_origins.sql). A schema that is made now has had no executor.
ALTER TABLE sidings.service
    ADD COLUMN timeline       text        NOT NULL DEFAULT sidings.timeline(),
    ADD COLUMN timeline_since timestamptz NOT NULL DEFAULT '-infinity';
UPDATE sidings.service SET timeline_since = clock_timestamp() WHERE timeline <> '00000001';  -- on the first, nothing was promoted

-- As in 0001, and epochs are larger than all of former timelines: those that got lost are not handed out a second time, and receivers of
-- fencing tokens have seen none that is larger.
CREATE OR REPLACE FUNCTION sidings.acquire(me uuid, wanted text[], generation bigint, lease interval, trust_expiry boolean)
RETURNS TABLE (acquired text, acquired_epoch bigint, losses bigint, former uuid)
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    o     record;
    ids   bigint[];
    first bigint;  -- epoch of this timeline
BEGIN
    INSERT INTO sidings.origin (origin)
    SELECT w FROM unnest(wanted) w
    WHERE NOT EXISTS (SELECT FROM sidings.origin x WHERE x.origin = w)
    ORDER BY w
    ON CONFLICT DO NOTHING;

    first := (('x' || sidings.timeline())::bit(32)::bigint - 1) * 1000000000;
    FOR o IN SELECT * FROM sidings.origin x WHERE x.origin = ANY (wanted) ORDER BY x.origin FOR UPDATE SKIP LOCKED
    LOOP
        IF o.owner IS NULL OR o.owner = me
           OR (trust_expiry AND o.lease_until < clock_timestamp()
               AND pg_postmaster_start_time() + lease < clock_timestamp())
        THEN
            ids := '{}';
            IF o.owner IS NOT NULL AND o.owner <> me THEN
                PERFORM 1 FROM sidings.executor e WHERE e.id = o.owner FOR UPDATE;   -- waits for its cycle in flight
                WITH cut AS (
                    UPDATE sidings.job j
                    SET losses = LEAST(j.losses + 1, 32767), attempt = j.attempt + 1
                    FROM sidings.executor e, unnest(e.running) r (id)
                    WHERE e.id = o.owner AND j.id = r.id AND j.origin = o.origin
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
                WHERE e.id = o.owner;
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
        ELSIF o.wanted_until IS NULL OR o.wanted_until < clock_timestamp() OR o.wanted_generation <= generation THEN
            UPDATE sidings.origin x
            SET wanted_by = me, wanted_generation = generation, wanted_until = clock_timestamp() + lease
            WHERE x.origin = o.origin;
        END IF;
    END LOOP;
END $$;
