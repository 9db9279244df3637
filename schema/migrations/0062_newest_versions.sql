-- runs with 0051
--
-- While somebody's transaction is open, no former version of a row can be removed. Of the rows that are written anew all the
-- time, an executor's and a partition's offset, each look by the key stepped over all of them: 2 ms after 100,000 cycles, or
-- batches. Hence these indexes, which have the newest versions last. `era` moves on in one of some hundreds of updates; the
-- others stay HOT. So a look steps over the versions of one era. Which version is the row does not depend on it: there is
-- one at most that a transaction sees. The keys stand in these indexes in another form, else the planner takes the primary
-- key for as good: it counts on one version.
--
-- The volatile default writes the tables anew, few rows. Else an index built beside an older transaction could not be used
-- until that has ended, for there are versions of a row that it does not hold (pg_index.indcheckxmin).
ALTER TABLE sidings.executor ADD COLUMN era integer NOT NULL DEFAULT (0 * random())::integer;
ALTER TABLE sidings.executor ALTER COLUMN era SET DEFAULT 0;
CREATE INDEX executor_newest ON sidings.executor (uuid_send(id), era);
ALTER TABLE sidings.consumer_offset ADD COLUMN era integer NOT NULL DEFAULT (0 * random())::integer;
ALTER TABLE sidings.consumer_offset ALTER COLUMN era SET DEFAULT 0;
CREATE INDEX consumer_offset_newest ON sidings.consumer_offset ((topic || ''), partition, era);
DROP INDEX sidings.consumer_offset_resets;   -- those of partitions that were ever reset: looked at every second
CREATE INDEX consumer_offset_resets ON sidings.consumer_offset ((topic || ''), partition, era) WHERE resets > 0;

-- Lock an executor's row, which waits for a cycle that is at work; returns where the row is then. Until the end of the
-- transaction it can be looked up there. null: there is no such row.
CREATE FUNCTION sidings.lock_executor(its_id uuid) RETURNS tid
LANGUAGE plpgsql AS $$
DECLARE
    place tid;
BEGIN
    SELECT e.ctid INTO place FROM sidings.executor e
    WHERE uuid_send(e.id) = uuid_send(its_id) ORDER BY e.era DESC LIMIT 1 FOR NO KEY UPDATE;
    RETURN place;
END $$;

-- The fence of a cycle: lock the executor's row by its id, which waits for a cycle that is at work, then compare and set.
-- Each statement in here has a snapshot of its own, so what was waited for is seen by the comparison. As a part of the
-- cycle's statement it would either pass the row over or be looked at again, with all of that statement's plan set up anew
-- (docs/decisions/0018-two-cycles.md). Returns whether the cycle may go on; if not, it is void.
CREATE OR REPLACE FUNCTION sidings.begin_cycle(me uuid, number bigint, its_fence bigint, named bigint[], its_timeline text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    place constant tid := sidings.lock_executor(me);
BEGIN
    UPDATE sidings.executor e SET running = named, cycle = number, era = number / 256
    WHERE e.ctid = place AND e.cycle = number - 1 AND e.fence = its_fence
          AND (its_timeline IS NULL OR sidings.timeline() = its_timeline);
    RETURN FOUND;
END
$$;

-- THE COMPARE-AND-SET that makes effects happen once: the offsets of a batch, moved as the last thing before the handlers'
-- transaction commits. It expects the offset that is *stored*: a log has gaps (transaction markers, compaction), so no
-- arithmetic on messages' offsets can know it. A partition that another process has moved on yields no row, and then the whole
-- transaction is rolled back. So does one that was reset, even where its offset has come back to the same.
--
-- A loop, which locks in the order of the arrays, whatever the planner makes of the table; they are sorted, so that two
-- processes that both believe to own the same partitions do not deadlock. It runs on the connection of the service author's own
-- statements, where the level may be SERIALIZABLE: what reads the table, or its index, is in conflict there with all that move
-- another offset meanwhile. Index: consumer_offset_newest, one probe per partition; sequential scans are off for the reason given
-- at sidings.parked. A row that is written at once counts as read no more, so that rows of one page do not come to count as all
-- of it.
CREATE OR REPLACE FUNCTION sidings.advance_offsets(topics text[], partitions integer[], expected bigint[], nexts bigint[], counts bigint[],
                                                   epochs integer[]) RETURNS TABLE (topic text, partition integer)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    place tid;
BEGIN
    PERFORM set_config('idle_in_transaction_session_timeout', '5s', true);
    FOR i IN 1 .. cardinality(topics) LOOP
        SELECT c.ctid INTO place FROM sidings.consumer_offset c
        WHERE c.topic || '' = topics[i] AND c.partition = partitions[i] ORDER BY c.era DESC LIMIT 1 FOR NO KEY UPDATE;
        RETURN QUERY
            UPDATE sidings.consumer_offset c
            SET next_offset = nexts[i], leader_epoch = epochs[i], epoch_offset = nexts[i],
                era = c.era + (random() < 1 / 256.0)::integer
            WHERE c.ctid = place AND c.next_offset = expected[i] AND c.resets = counts[i]
            RETURNING c.topic, c.partition;
    END LOOP;
END $$;

-- As before, but for where the executors' rows are looked up: what acquires an origin, intervenes in one, or notes an action.
CREATE OR REPLACE FUNCTION sidings.acquire(me uuid, wanted text[], generation bigint, lease interval, trust_expiry boolean)
RETURNS TABLE (acquired text, acquired_epoch bigint, losses bigint, former uuid)
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    o     record;
    ids   bigint[];
    first bigint;  -- epoch of this timeline
    ours  text[];
    at    timestamptz;
    place tid;
BEGIN
    INSERT INTO sidings.origin (origin)
    SELECT w FROM unnest(wanted) w
    WHERE NOT EXISTS (SELECT FROM sidings.origin x WHERE x.origin = w)
    ORDER BY w
    ON CONFLICT DO NOTHING;

    first := (('x' || sidings.timeline())::bit(32)::bigint - 1) * 1000000000;
    ours := ARRAY(SELECT x.origin FROM sidings.origin x WHERE x.origin = ANY (wanted) ORDER BY x.origin FOR UPDATE SKIP LOCKED);
    at := clock_timestamp();
    trust_expiry := trust_expiry AND pg_postmaster_start_time() + lease < at;
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
        ELSIF o.wanted_until IS NULL OR o.wanted_until < clock_timestamp() OR o.wanted_generation <= generation THEN
            UPDATE sidings.origin x
            SET wanted_by = me, wanted_generation = generation, wanted_until = clock_timestamp() + lease
            WHERE x.origin = o.origin;
        END IF;
    END LOOP;
END $$;

CREATE OR REPLACE FUNCTION sidings.intervene(its_origin text, OUT owner uuid, OUT epoch bigint, OUT running bigint[])
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    place tid;
BEGIN
    PERFORM sidings.begin_action();
    INSERT INTO sidings.origin (origin)
    SELECT its_origin WHERE NOT EXISTS (SELECT FROM sidings.origin o WHERE o.origin = its_origin)
    ON CONFLICT DO NOTHING;
    SELECT o.owner, o.epoch INTO owner, epoch FROM sidings.origin o WHERE o.origin = its_origin FOR NO KEY UPDATE;
    place := sidings.lock_executor(intervene.owner);
    UPDATE sidings.executor e SET fence = e.fence + 1 WHERE e.ctid = place RETURNING e.running INTO running;
    running := coalesce(running, '{}');
    PERFORM sidings.announce(its_origin);
END $$;

CREATE OR REPLACE FUNCTION sidings.intervene_for_long(its_origin text, OUT owner uuid, OUT epoch bigint, OUT running bigint[])
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    place tid;
BEGIN
    PERFORM sidings.begin_action();
    PERFORM sidings.stay_origin(its_origin);
    SELECT o.owner, o.epoch INTO owner, epoch FROM sidings.origin o WHERE o.origin = its_origin;
    place := sidings.lock_executor(intervene_for_long.owner);
    UPDATE sidings.executor e SET fence = e.fence + 1 WHERE e.ctid = place RETURNING e.running INTO running;
    running := coalesce(running, '{}');
    PERFORM sidings.announce(its_origin);
END $$;

CREATE OR REPLACE FUNCTION sidings.note_action(actor text, action text, target jsonb, reason text, detail jsonb DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    e record;
BEGIN
    IF coalesce(actor, '') = '' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = format('%s: nobody is named who does it', action),
            HINT = 'Give actor => ''the name of a person or program''.';
    END IF;
    SELECT x.id, x.fence INTO e
    FROM sidings.origin o, LATERAL (SELECT * FROM sidings.executor x
                                    WHERE uuid_send(x.id) = uuid_send(o.owner) ORDER BY x.era DESC LIMIT 1) x
    WHERE o.origin = target ->> 'origin'
          AND action IN ('cancel', 'discard', 'retry now', 'release', 'release group', 'skip head', 'clear group');
    INSERT INTO sidings.audit (actor, action, target, reason, detail, executor, fence)
    VALUES (actor, action, target, reason, detail, e.id, e.fence);
END $$;
