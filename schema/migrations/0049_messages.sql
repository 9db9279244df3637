-- What consumers keep beside their effects: offsets, parked messages, and the ids of the messages that were handled.

-- The next offset to read. Moved by a conditional UPDATE inside the handler's transaction; rows are created
-- at assignment, because an upsert would accept any expectation.
CREATE TABLE sidings.consumer_offset (
    next_offset  bigint NOT NULL,
    partition    integer NOT NULL,
    topic        text NOT NULL,
    -- A part of what a consumer's compare-and-set expects: a transaction that began before a reset can never move the offset
    -- after it, not even where the offset comes to stand where it expects it.
    resets       bigint NOT NULL DEFAULT 0,
    -- Which topic the offset belongs to: one that was deleted and made anew has the same name, and another id. null: not known
    -- yet. Whoever places the partition next stores the id of the topic that is there then.
    topic_id     uuid,
    -- In which leader epoch the record before the offset was written: after an unclean leader election, or where a broker has
    -- lost what it had not written to its disk, a log is cut off, and may have grown past the offset again before anybody
    -- looks. null: not known. It holds for epoch_offset: who knows nothing of it moves next_offset alone.
    leader_epoch integer,
    epoch_offset bigint,
    CONSTRAINT consumer_offset_pkey PRIMARY KEY (topic, partition)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0);
-- What running consumers look at, every second. Not touched when an offset moves: these stay HOT updates.
CREATE INDEX consumer_offset_resets ON sidings.consumer_offset (topic, partition) WHERE resets > 0;

-- Which of these keys have a parked message. A function, because the question is asked on the connection of the service
-- author's own statements: only here are sequential scans switched off, which a plan made while the table was empty would
-- choose, and keep. Index: job_message.
CREATE FUNCTION sidings.parked(origins text[], groups text[]) RETURNS TABLE (origin text, "group" text)
LANGUAGE sql STABLE SET enable_seqscan = off AS $$
    SELECT k.origin, k."group"
    FROM unnest(origins, groups) AS k (origin, "group")
    WHERE EXISTS (SELECT FROM sidings.job j
                  WHERE j.origin = k.origin AND j."group" = k."group"
                    AND j.position IS NOT NULL AND j.type LIKE 'message:%')
$$;

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
-- default partition. The lock lets one at a time look and make. With the rights of its owner: a partition can be made by
-- nobody else, and the first id of a day makes it. Who may call it is not asked, so of others than the owner it takes
-- only the days that a consumer needs.
CREATE FUNCTION sidings.make_seen_day(its_day date) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    part  constant text := 'message_seen_' || to_char(its_day, 'YYYYMMDD');
    today constant date := (clock_timestamp() AT TIME ZONE 'UTC')::date;
BEGIN
    IF to_regclass('sidings.' || part) IS NULL THEN
        IF its_day NOT BETWEEN today - 1 AND today + 2 AND NOT pg_has_role(session_user, current_user, 'MEMBER') THEN
            RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = format('its_day: %s is none to make now', its_day);
        END IF;
        LOCK TABLE sidings.message_seen IN SHARE UPDATE EXCLUSIVE MODE;
        IF to_regclass('sidings.' || part) IS NULL THEN
            EXECUTE format('CREATE TABLE sidings.%I (LIKE sidings.message_seen INCLUDING DEFAULTS)', part);
            EXECUTE format('ALTER TABLE sidings.message_seen ATTACH PARTITION sidings.%I FOR VALUES IN (%L)', part, its_day);
        END IF;
    END IF;
END $$;

-- Record the ids of a batch, and return which of its messages are duplicates: their places in the arrays, from 1. Called
-- in the handlers' transaction, before any handler, so that a transaction that waits here for another with the same id
-- holds no other lock; ids are inserted in their order, so that two cannot deadlock. A message whose id is recorded with
-- its own partition and offset is no duplicate: it is delivered again, after a reset, or because the transaction that
-- recorded it ended before it came to it. In the first hour of a day an id is recorded under the day before as well: a
-- transaction that began before midnight, and may still be open, meets the same id there. No consumer's transaction lasts
-- that long (Subscription sees to it).
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

-- Days ahead are made, those older than `keep_days` are dropped. One at a time does the work. In the first hour of a day,
-- in which ids are recorded under the day before as well, that day's table is made, too. Where it is missing, as in a
-- schema that is an hour old, a handler's transaction makes it, and all other messages wait for that one's end.
--   at   the time; for tests
-- To drop a day, all writers have to be kept out for a moment. Where that takes too long, or anything else keeps a day
-- from being dropped (another owner, a view on it), it is dropped another time, and all other days are made and dropped
-- all the same. Locks are waited for for two seconds in all, whichever days they are of: more than the statement may take
-- would undo the days ahead, too. Which days are old their names tell, compared as texts: as Postgres may plan it, the
-- names of all other tables are read as well, and are no dates.
CREATE FUNCTION sidings.maintain_seen(keep_days integer, at timestamptz DEFAULT now()) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    today constant date := (at AT TIME ZONE 'UTC')::date;
    d   date := ((at - interval '1 hour') AT TIME ZONE 'UTC')::date;
    old record;
    until timestamptz;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('sidings.maintain_seen', 0)) THEN
        RETURN;
    END IF;
    WHILE d <= today + 2 LOOP
        PERFORM sidings.make_seen_day(d);
        d := d + 1;
    END LOOP;
    until := clock_timestamp() + interval '2 seconds';
    FOR old IN
        SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'sidings.message_seen'::regclass
          AND c.relname < 'message_seen_' || to_char(today - keep_days, 'YYYYMMDD')
        ORDER BY random()   -- a few that are in use for long keep no others from their turn
    LOOP
        EXIT WHEN clock_timestamp() > until;
        BEGIN
            PERFORM set_config('lock_timeout', '500ms', true);
            EXECUTE format('DROP TABLE sidings.%I', old.relname);
        EXCEPTION WHEN OTHERS THEN   -- in use, another's, or something depends on it
            RAISE LOG 'sidings: % will be dropped later: %', old.relname, SQLERRM;
        END;
    END LOOP;
END $$;

-- The messages of a topic that are stored as jobs of an origin: waiting, delayed or held; one branch for each partial
-- index. Only those of the topic itself, since nobody delivers others again. The type alone does not tell: a topic that was
-- deleted and made anew has the same name, and after a rename the jobs of the former name have this type
-- (docs/operations.md). So the topic's name in the message is looked at and, where the message tells it and `its_id` is not
-- null, its id.
--
-- The replacement is for the NUL: a header's name may have one, json keeps it as \u0000, and ->> refuses such a document
-- altogether, whichever field is asked for. It is of the same form, so that an escaped backslash before u0000 stays one.
CREATE FUNCTION sidings.stored_messages(its_topic text, its_origin text, its_id uuid)
RETURNS TABLE (job bigint, partition integer, "offset" bigint)
LANGUAGE sql STABLE SET enable_seqscan = off AS $$
    SELECT m.id, (p.payload ->> 'partition')::integer, (p.payload ->> 'offset')::bigint
    FROM (SELECT j.id, j.type, j.payload FROM sidings.job j
          WHERE j.origin = its_origin AND j.position IS NOT NULL AND j.type LIKE 'message:%'
          UNION ALL
          SELECT j.id, j.type, j.payload FROM sidings.job j
          WHERE j.origin = its_origin AND j.position IS NULL AND j.held IS NULL
          UNION ALL
          SELECT j.id, j.type, j.payload FROM sidings.job j
          WHERE j.origin = its_origin AND j.held IS NOT NULL) m
    CROSS JOIN LATERAL (SELECT replace(m.payload::text, '\u0000', '\u0020')::json AS payload) p
    WHERE m.type = 'message:' || its_topic AND (p.payload ->> 'topic' = its_topic) IS NOT FALSE
      AND (p.payload ->> 'topic_id' = its_id::text) IS NOT FALSE
$$;

-- Move stored offsets by order of a person. Lock order: consumer_offset by partition, as advance_offsets.sql; then as
-- every action: origins by name, executors, jobs. Called in autocommit.
-- (1) Once the rows are locked, no transaction of a consumer can commit anything of these partitions under the old number.
-- (2) So the next statements, each with a fresh snapshot, see every message that was ever stored as a job. Those from the
--     new offset on will be delivered again: their jobs are cancelled. One that runs just now is transactional, finds its
--     row gone at its end, and is undone. They stand in their partition's origin; where partitions were added, also in
--     another one of the topic. A move of the partitions' jobs that is under way is waited for, before they are looked for.
-- The leader epoch becomes null: whatever has become of the log, a person has said where to go on in it.
--   topic_id   of the topic that the offsets are meant for; null: that of the time when the partitions are placed. Of
--              messages of another topic, which are not delivered again, no jobs are cancelled
--   cuts       where the log of each partition was cut off before its stored offset; null: it was not, or it is not
--              known. Of messages that were cut off, which are not delivered again either, no jobs are cancelled
CREATE FUNCTION sidings.reset_offsets(
    its_topic text, partitions integer[], offsets bigint[], actor text, reason text, topic_id uuid DEFAULT NULL,
    cuts bigint[] DEFAULT NULL)
RETURNS TABLE (its_partition integer, former bigint, cancelled bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '5s' AS $$
DECLARE
    o       record;
    ids     bigint[];
    formers bigint[] := '{}';
    others  integer[] := '{}';  -- partitions whose offset belonged to another topic
    other   boolean;
    counts  bigint[] := '{}';
    taken   text;
    holder  record;
BEGIN
    FOR o IN SELECT r.partition, r.next FROM unnest(partitions, offsets) AS r (partition, next) ORDER BY r.partition
    LOOP
        SELECT c.next_offset, c.topic_id <> reset_offsets.topic_id INTO former, other FROM sidings.consumer_offset c
        WHERE c.topic = its_topic AND c.partition = o.partition FOR UPDATE;
        formers[o.partition] := former;
        counts[o.partition] := 0;
        IF other THEN
            others := others || o.partition;
        END IF;
        INSERT INTO sidings.consumer_offset AS c (topic, partition, next_offset, resets, topic_id)
        VALUES (its_topic, o.partition, o.next, 1, reset_offsets.topic_id)
        ON CONFLICT ON CONSTRAINT consumer_offset_pkey
        DO UPDATE SET next_offset = excluded.next_offset, resets = c.resets + 1, topic_id = excluded.topic_id,
                      leader_epoch = NULL;
    END LOOP;
    PERFORM sidings.stay_origin(n.origin) FROM (SELECT its_topic || '/' || p AS origin FROM unnest(partitions) p ORDER BY 1) n;
    FOR o IN
        WITH moved AS (
            SELECT r.partition, r.next, coalesce(r.cut, 9223372036854775807) AS until
            FROM unnest(partitions, offsets, cuts) AS r (partition, next, cut)
            WHERE r.partition <> ALL (others)
        ), origins AS (
            SELECT its_topic || '/' || n AS origin
            FROM generate_series(0, coalesce((SELECT t.partitions FROM sidings.topic t WHERE t.topic = its_topic), 0) - 1) n
        ), elsewhere AS (
            SELECT DISTINCT x.origin, v.partition, v.next, v.until
            FROM origins x CROSS JOIN LATERAL sidings.stored_messages(its_topic, x.origin, reset_offsets.topic_id) m
            JOIN moved v ON v.partition = m.partition AND m."offset" >= v.next AND m."offset" < v.until
        )
        SELECT its_topic || '/' || v.partition AS origin, v.partition, v.next, v.until FROM moved v
        UNION
        SELECT e.origin, e.partition, e.next, e.until FROM elsewhere e
        ORDER BY origin, partition
    LOOP
        IF o.origin IS DISTINCT FROM taken THEN
            holder := sidings.intervene_for_long(o.origin);
            taken := o.origin;
        END IF;
        ids := ARRAY(SELECT m.job FROM sidings.stored_messages(its_topic, o.origin, reset_offsets.topic_id) m
                     WHERE m.partition = o.partition AND m."offset" >= o.next AND m."offset" < o.until);
        -- In the order in which clear_group() and promotion lock them: where nobody holds the origin, no holder's row is waited for before.
        PERFORM 1 FROM sidings.job j WHERE j.id = ANY (ids) ORDER BY j.run_at, j.id FOR UPDATE;
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
