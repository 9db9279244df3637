-- What a consumer remembers beside its offsets: the ids of the messages that it has handled (dedup), and resets.

-- IDS OF MESSAGES, recorded in the transaction of their effects (docs/consumer.md, "Duplicates"). One
-- partition a day, dropped as a whole. An id belongs to its topic, not to a Kafka partition: a repeat may land in another.
CREATE TABLE sidings.message_seen (
    day       date NOT NULL,               -- of the record, in UTC
    id        bytea NOT NULL,              -- the first 16 bytes of SHA-256 over topic, NUL and id: short, whatever the id
    partition integer NOT NULL,            -- where the message stands that counts: delivered again, it is no duplicate
    "offset"  bigint NOT NULL,
    CONSTRAINT message_seen_pkey PRIMARY KEY (id, day)
) PARTITION BY LIST (day);

-- The table of one day. CREATE TABLE … PARTITION OF would lock all writers out; ATTACH does not, as long as there is no
-- default partition. The lock lets one at a time look and make.
CREATE FUNCTION sidings.make_seen_day(its_day date) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    part constant text := 'message_seen_' || to_char(its_day, 'YYYYMMDD');
BEGIN
    IF to_regclass('sidings.' || part) IS NULL THEN
        LOCK TABLE sidings.message_seen IN SHARE UPDATE EXCLUSIVE MODE;
        IF to_regclass('sidings.' || part) IS NULL THEN
            EXECUTE format('CREATE TABLE sidings.%I (LIKE sidings.message_seen INCLUDING DEFAULTS)', part);
            EXECUTE format('ALTER TABLE sidings.message_seen ATTACH PARTITION sidings.%I FOR VALUES IN (%L)', part, its_day);
        END IF;
    END IF;
END $$;

-- Record the ids of a batch, and return which of its messages are duplicates: their places in the arrays, from 1. Called in
-- the handlers' transaction, before any handler, so that a transaction that waits here for another with the same id holds
-- no other lock; ids are inserted in their order, so that two cannot deadlock.
-- A message whose id is recorded with its own partition and offset is no duplicate: it is delivered again, after a reset, or
-- because the transaction that recorded it ended before it came to it.
-- In the first hour of a day an id is recorded under the day before as well: a transaction that began before midnight, and
-- may still be open, meets the same id there. No consumer's transaction lasts that long (Subscription sees to it).
--   at   the time; for tests
CREATE FUNCTION sidings.record_seen(ids bytea[], partitions integer[], offsets bigint[],
                                    at timestamptz DEFAULT clock_timestamp()) RETURNS bigint[]
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off AS $$
DECLARE
    today constant date := (at AT TIME ZONE 'UTC')::date;
    days  date[] := ARRAY[today];
    its_day date;
    again bigint[];
    fresh bigint[];
BEGIN
    SELECT coalesce(array_agg(f.n) FILTER (WHERE f.again), '{}'), coalesce(array_agg(f.n) FILTER (WHERE f.first), '{}')
    INTO again, fresh
    FROM (
        SELECT g.n, s.partition = g.partition AND s."offset" = g."offset" AS again,
               s.partition IS NULL AND row_number() OVER (PARTITION BY g.id ORDER BY g.n) = 1 AS first
        FROM unnest(ids, partitions, offsets) WITH ORDINALITY AS g (id, partition, "offset", n)
        LEFT JOIN LATERAL (SELECT m.partition, m."offset" FROM sidings.message_seen m WHERE m.id = g.id LIMIT 1) s ON true
    ) f;
    IF (at AT TIME ZONE 'UTC')::time < '01:00' THEN
        days := ARRAY[today - 1, today];
    END IF;
    FOREACH its_day IN ARRAY days LOOP
        PERFORM sidings.make_seen_day(its_day);
        WITH recorded AS (
            INSERT INTO sidings.message_seen (day, id, partition, "offset")
            SELECT its_day, g.id, g.partition, g."offset"
            FROM unnest(ids, partitions, offsets) WITH ORDINALITY AS g (id, partition, "offset", n)
            WHERE g.n = ANY (fresh)
            ORDER BY g.id
            ON CONFLICT DO NOTHING
            RETURNING message_seen.partition, message_seen."offset"
        )
        SELECT coalesce(array_agg(g.n), '{}') INTO fresh
        FROM recorded r
        JOIN unnest(partitions, offsets) WITH ORDINALITY AS g (partition, "offset", n) USING (partition, "offset");
    END LOOP;
    IF cardinality(again) + cardinality(fresh) = cardinality(ids) THEN
        RETURN '{}';
    END IF;
    RETURN ARRAY(SELECT n FROM generate_series(1, cardinality(ids)) n WHERE n <> ALL (again || fresh) ORDER BY n);
END $$;

-- Days ahead are made, those older than `keep_days` are dropped. One at a time does the work. To drop a day, all writers
-- have to be kept out for a moment; where that takes too long, the day is dropped another time.
CREATE FUNCTION sidings.maintain_seen(keep_days integer) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    today constant date := (now() AT TIME ZONE 'UTC')::date;
    old record;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('sidings.maintain_seen', 0)) THEN
        RETURN;
    END IF;
    FOR n IN 0 .. 2 LOOP
        PERFORM sidings.make_seen_day(today + n);
    END LOOP;
    FOR old IN
        SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'sidings.message_seen'::regclass
          AND to_date(right(c.relname, 8), 'YYYYMMDD') < today - keep_days
        ORDER BY c.relname
    LOOP
        BEGIN
            PERFORM set_config('lock_timeout', '500ms', true);
            EXECUTE format('DROP TABLE sidings.%I', old.relname);
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            RAISE LOG 'sidings: % is in use and will be dropped later', old.relname;
        END;
    END LOOP;
END $$;

-- RESETS. The number is a part of what a consumer's compare-and-set expects: a transaction that began before the reset can
-- never move the offset after it, not even where the offset comes to stand where it expects it.
ALTER TABLE sidings.consumer_offset ADD COLUMN resets bigint NOT NULL DEFAULT 0;
-- What running consumers look at, every second. Not touched when an offset moves: these stay HOT updates.
CREATE INDEX consumer_offset_resets ON sidings.consumer_offset (topic, partition) WHERE resets > 0;

-- The messages of a topic that are stored as jobs of an origin: waiting, delayed or held; one branch for each partial index.
CREATE FUNCTION sidings.stored_messages(its_topic text, its_origin text)
RETURNS TABLE (job bigint, partition integer, "offset" bigint)
LANGUAGE sql STABLE SET enable_seqscan = off AS $$
    SELECT m.id, (m.payload ->> 'partition')::integer, (m.payload ->> 'offset')::bigint
    FROM (SELECT j.id, j.type, j.payload FROM sidings.job j
          WHERE j.origin = its_origin AND j.position IS NOT NULL AND j.type LIKE 'message:%'
          UNION ALL
          SELECT j.id, j.type, j.payload FROM sidings.job j
          WHERE j.origin = its_origin AND j.position IS NULL AND j.held IS NULL
          UNION ALL
          SELECT j.id, j.type, j.payload FROM sidings.job j
          WHERE j.origin = its_origin AND j.held IS NOT NULL) m
    WHERE m.type = 'message:' || its_topic
$$;

-- Move stored offsets by order of a person. Lock order: consumer_offset by partition, as advance_offsets.sql; then as every
-- action (0006): origins by name, executors, jobs. Called in autocommit.
-- (1) Once the rows are locked, no transaction of a consumer can commit anything of these partitions under the old number.
-- (2) So the next statements, each with a fresh snapshot, see every message that was ever stored as a job. Those from the
--     new offset on will be delivered again: their jobs are cancelled. One that runs just now is transactional, finds its
--     row gone at its end, and is undone. They stand in their partition's origin; where partitions were added, also in
--     another one of the topic (0010).
CREATE FUNCTION sidings.reset_offsets(its_topic text, partitions integer[], offsets bigint[], actor text, reason text)
RETURNS TABLE (its_partition integer, former bigint, cancelled bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '5s' AS $$
DECLARE
    o       record;
    ids     bigint[];
    formers bigint[] := '{}';
    counts  bigint[] := '{}';
    taken   text;
    holder  record;
BEGIN
    FOR o IN SELECT r.partition, r.next FROM unnest(partitions, offsets) AS r (partition, next) ORDER BY r.partition
    LOOP
        SELECT c.next_offset INTO former FROM sidings.consumer_offset c
        WHERE c.topic = its_topic AND c.partition = o.partition FOR UPDATE;
        formers[o.partition] := former;
        counts[o.partition] := 0;
        INSERT INTO sidings.consumer_offset AS c (topic, partition, next_offset, resets)
        VALUES (its_topic, o.partition, o.next, 1)
        ON CONFLICT ON CONSTRAINT consumer_offset_pkey
        DO UPDATE SET next_offset = excluded.next_offset, resets = c.resets + 1;
    END LOOP;
    FOR o IN
        WITH moved AS (
            SELECT r.partition, r.next FROM unnest(partitions, offsets) AS r (partition, next)
        ), origins AS (
            SELECT its_topic || '/' || n AS origin
            FROM generate_series(0, coalesce((SELECT t.partitions FROM sidings.topic t WHERE t.topic = its_topic), 0) - 1) n
        ), elsewhere AS (
            SELECT DISTINCT x.origin, v.partition, v.next
            FROM origins x CROSS JOIN LATERAL sidings.stored_messages(its_topic, x.origin) m
            JOIN moved v ON v.partition = m.partition AND m."offset" >= v.next
        )
        SELECT its_topic || '/' || v.partition AS origin, v.partition, v.next FROM moved v
        UNION
        SELECT e.origin, e.partition, e.next FROM elsewhere e
        ORDER BY origin, partition
    LOOP
        IF o.origin IS DISTINCT FROM taken THEN
            holder := sidings.intervene(o.origin);
            taken := o.origin;
        END IF;
        ids := ARRAY(SELECT m.job FROM sidings.stored_messages(its_topic, o.origin) m
                     WHERE m.partition = o.partition AND m."offset" >= o.next);
        PERFORM 1 FROM sidings.job j WHERE j.id = ANY (ids) ORDER BY j.id FOR UPDATE;
        counts[o.partition] := counts[o.partition]
            + sidings.end_jobs(ids, 'cancelled', actor,
                               concat_ws(': ', 'the consumer was reset, the message is delivered again', reason),
                               holder.owner, holder.epoch, holder.running);
    END LOOP;
    FOR o IN SELECT r.partition, r.next FROM unnest(partitions, offsets) AS r (partition, next) ORDER BY r.partition
    LOOP
        its_partition := o.partition;
        former := formers[o.partition];
        cancelled := counts[o.partition];
        PERFORM sidings.note_action(actor, 'reset', jsonb_build_object('origin', its_topic || '/' || o.partition), reason,
                                    jsonb_build_object('from', former, 'to', o.next, 'cancelled', cancelled));
        RETURN NEXT;
    END LOOP;
END $$;
