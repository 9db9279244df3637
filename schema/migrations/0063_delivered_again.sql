-- runs with 0051
--
-- A message that is delivered again, since its consumer was reset, is not requeued as well: it took effect twice, the second
-- time behind all that was newer of its key. What had ended before the reset no reset could find, and what the reset itself
-- had cancelled stood with what can be requeued. Each function is written out once more; what has changed stands above it.

-- The resets of a partition.
CREATE INDEX audit_reset ON sidings.audit ((target ->> 'origin'), id) WHERE action = 'reset';

-- Which message an ended job's payload is; no row for other jobs. After a rename (docs/operations.md) its topic is not that of
-- the type. OFFSET 0: or the payload would be parsed anew wherever a field is asked for. For the replacement see
-- sidings.stored_messages.
CREATE FUNCTION sidings.message_of(its_type text, its_payload json)
RETURNS TABLE (topic text, partition integer, "offset" bigint, topic_id text)
LANGUAGE sql STABLE AS $$
    SELECT coalesce(p.payload ->> 'topic', substr(its_type, 9)), (p.payload ->> 'partition')::integer,
           (p.payload ->> 'offset')::bigint, p.payload ->> 'topic_id'
    FROM (SELECT replace(its_payload::text, '\u0000', '\u0020')::json AS payload
          WHERE its_type LIKE 'message:%' OFFSET 0) p
    OFFSET 0
$$;

-- The last reset since which the message of an ended job is delivered again; no row where nobody does that. From a reset on
-- this is so from its offset up to where the next one has found the reader: one that was taken back at once has brought
-- nothing again. Not what is of another topic of that name, nor what the log had lost, as far as the reset has noted it.
-- Index: audit_reset, probed once for each message.
CREATE FUNCTION sidings.delivered_again(its_type text, its_payload json, its_enqueued_at timestamptz)
RETURNS TABLE (origin text, next_offset bigint, actor text, at timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT m.topic || '/' || m.partition, (r.detail ->> 'to')::bigint, r.actor, r.at
    FROM sidings.message_of(its_type, its_payload) m
    CROSS JOIN LATERAL (SELECT a.id, a.at, a.actor, a.detail, lead((a.detail ->> 'from')::bigint) OVER (ORDER BY a.id) AS reached
                        FROM sidings.audit a
                        WHERE a.action = 'reset' AND a.target ->> 'origin' = m.topic || '/' || m.partition) r
    WHERE r.at > its_enqueued_at AND m."offset" >= (r.detail ->> 'to')::bigint
      AND (m."offset" < r.reached) IS NOT FALSE
      AND (m."offset" < (r.detail ->> 'until')::bigint) IS NOT FALSE
      AND (m.topic_id = r.detail ->> 'topic_id') IS NOT FALSE
    ORDER BY r.id DESC LIMIT 1
$$;

-- As before, but not a message that is delivered again, unless `force`. Lock order: consumer_offset, as a reset; then as before.
CREATE OR REPLACE FUNCTION sidings.requeue_job(
    job bigint, actor text, reason text DEFAULT NULL, force boolean DEFAULT false, finished_at timestamptz DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off SET lock_timeout = '2s' AS $$
DECLARE
    old    record;
    before record;
    again  record;
    new_id bigint;
    moved  record;
BEGIN
    PERFORM sidings.begin_action();
    PERFORM pg_advisory_xact_lock(hashtextextended('sidings.requeue', job));   -- two at once: the second sees the first
    IF EXISTS (SELECT FROM sidings.job j WHERE j.id = job) THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004', MESSAGE = format('job %s has not ended', job),
            HINT = 'Retry it now; release it if it is held.';
    END IF;
    SELECT h.* INTO old FROM sidings.job_history h
    WHERE h.job_id = job AND h.finished_at = requeue_job.finished_at
      AND h.outcome IN ('succeeded', 'discarded', 'cancelled', 'superseded');
    IF NOT FOUND THEN
        SELECT h.* INTO old FROM sidings.job_history h
        WHERE h.job_id = job AND h.outcome IN ('succeeded', 'discarded', 'cancelled', 'superseded')
        ORDER BY h.finished_at DESC LIMIT 1;
    END IF;
    IF NOT FOUND THEN
        PERFORM sidings.no_such_job(job);
    END IF;
    IF old.outcome = 'succeeded' OR old.payload IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004',
            MESSAGE = CASE WHEN old.outcome = 'succeeded' THEN format('job %s has succeeded', job)
                           ELSE format('the history has no payload of job %s', job) END,
            HINT = 'Enqueue a new job.';
    END IF;
    SELECT a.actor, a.at, a.detail ->> 'new_job' AS new_job INTO before FROM sidings.audit a
    WHERE (a.target ->> 'job')::bigint = job AND a.target ? 'job' AND a.action = 'requeue' ORDER BY a.id DESC LIMIT 1;
    IF FOUND AND NOT force THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004',
            MESSAGE = format('job %s was requeued already, as job %s, by %s at %s', job, before.new_job, before.actor,
                             to_char(before.at, 'YYYY-MM-DD HH24:MI:SS OF')),
            HINT = 'Look at that job; force => true requeues it once more.';
    END IF;
    -- A reset that is under way is waited for, and one that begins now waits, and cancels the new job.
    PERFORM FROM sidings.message_of(old.type, old.payload) m
    JOIN sidings.consumer_offset c ON c.topic || '' = m.topic AND c.partition = m.partition
    ORDER BY c.era DESC LIMIT 1 FOR KEY SHARE OF c;
    SELECT d.* INTO again FROM sidings.delivered_again(old.type, old.payload, old.enqueued_at) d;
    IF FOUND AND NOT force THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004',
            MESSAGE = format('job %s is a message that is delivered again: %s reset %s to offset %s at %s', job, again.actor,
                             again.origin, again.next_offset, to_char(again.at, 'YYYY-MM-DD HH24:MI:SS OF')),
            HINT = 'Requeued, it would take effect twice, now behind what is newer of its key. Leave it; force => true requeues it '
                   'all the same.';
    END IF;
    -- Where partitions were added, its group may be elsewhere; a tick goes where the other ticks of its type are.
    old.origin := coalesce((SELECT p.job_origin FROM sidings.periodic p WHERE p.name = old.type AND p.origin = ''),
                           sidings.place(old.origin, old."group"));
    PERFORM sidings.stay_origin(old.origin);
    -- Where its origin was emptied by a move, and nobody has held it since, it follows the others of its group: with each move that came
    -- after that one and emptied the place where they were, so it ends, though they may have come back.
    SELECT a.id, a.target ->> 'to' AS origin INTO moved
    FROM sidings.audit a JOIN sidings.origin x ON x.origin = old.origin AND x.owner IS NULL
    WHERE a.action = 'move' AND a.target ->> 'origin' = old.origin AND (a.detail ->> 'epoch')::bigint = x.epoch
    ORDER BY a.id DESC LIMIT 1;
    WHILE FOUND LOOP
        old.origin := moved.origin;
        PERFORM sidings.stay_origin(old.origin);
        SELECT a.id, a.target ->> 'to' AS origin INTO moved
        FROM sidings.audit a WHERE a.action = 'move' AND a.target ->> 'origin' = old.origin AND a.id > moved.id
        ORDER BY a.id LIMIT 1;
    END LOOP;
    -- Under the lock of its row: a tick that is fired meanwhile may have left for another origin, or would.
    old.origin := sidings.origin_of_released(old.type, old.origin);
    INSERT INTO sidings.job (type, origin, "group", priority, payload, headers)
    VALUES (old.type, old.origin, old."group", old.priority, old.payload,
            CASE WHEN old.correlation_id IS NOT NULL THEN jsonb_build_object('correlation_id', old.correlation_id) END)
    RETURNING id INTO new_id;
    PERFORM sidings.announce(old.origin);
    PERFORM sidings.note_action(actor, 'requeue', jsonb_build_object('job', job, 'type', old.type, 'origin', old.origin,
                                                                     'group', old."group"),
                                reason, jsonb_build_object('found', old.outcome, 'new_job', new_id));
    RETURN new_id;
END $$;

-- As before, but the audit tells the topic's id, and up to which offset messages are delivered again that had come before
-- (sidings.delivered_again): where the log was cut off; none of them, where the offset belonged to another topic.
CREATE OR REPLACE FUNCTION sidings.reset_offsets(
    its_topic text, partitions integer[], offsets bigint[], actor text, reason text, topic_id uuid DEFAULT NULL,
    cuts bigint[] DEFAULT NULL)
RETURNS TABLE (its_partition integer, former bigint, cancelled bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off SET lock_timeout = '5s' AS $$
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
    FOR o IN SELECT r.partition, r.next, CASE WHEN r.partition = ANY (others) THEN r.next ELSE r.cut END AS until
             FROM unnest(partitions, offsets, cuts) AS r (partition, next, cut) ORDER BY r.partition
    LOOP
        its_partition := o.partition;
        former := formers[o.partition];
        cancelled := counts[o.partition];
        PERFORM sidings.note_action(actor, 'reset', jsonb_build_object('origin', its_topic || '/' || o.partition), reason,
                                    jsonb_build_object('from', former, 'to', o.next, 'cancelled', cancelled)
                                    || jsonb_strip_nulls(jsonb_build_object('topic_id', topic_id, 'until', o.until)));
        RETURN NEXT;
    END LOOP;
END $$;
