-- runs with 0051
--
-- What is requeued or released goes where its group is, or its ticks are, and run. Each function is written out once more; what
-- has changed stands above it.

-- The key of the message that a job's payload is; null for other jobs. For the replacement see sidings.stored_messages. A CASE, since
-- PostgreSQL 18 plans the statement with its arguments as constants, and would decode what a WHERE was to leave alone.
CREATE FUNCTION sidings.key_of(its_type text, its_payload json) RETURNS bytea
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN its_type LIKE 'message:%'
                THEN decode(replace(its_payload::text, '\u0000', '\u0020')::json ->> 'key', 'base64') END
$$;

-- The first of these origins that an executor has leased and nobody has paused; null: none is. Plan: origin_pkey, executor_pkey.
CREATE FUNCTION sidings.running_origin(origins text[]) RETURNS text
LANGUAGE sql VOLATILE SET enable_seqscan = off SET jit = off AS $$
    SELECT o.origin FROM sidings.origin o JOIN sidings.executor e ON e.id = o.owner
    WHERE o.origin = ANY (origins) AND o.lease_until > clock_timestamp()
      AND NOT EXISTS (SELECT FROM sidings.pause p WHERE p.kind = 'origin' AND p.origin = o.origin)
    ORDER BY array_position(origins, o.origin) LIMIT 1
$$;

-- As before, but if nothing runs in `its_origin`, and the ticks are where something does, it goes there: the next ones would
-- follow it, and wait behind it. And where a periodic job is one per origin, a tick stays in its own, whatever row is left from
-- when it was one per service: of the two the one that was seen last is in force.
CREATE OR REPLACE FUNCTION sidings.origin_of_released(its_type text, its_origin text) RETURNS text
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off SET lock_timeout = '2s' AS $$
DECLARE
    place text;
    seen  timestamptz;
BEGIN
    SELECT p.job_origin, p.seen_at INTO place, seen FROM sidings.periodic p WHERE p.name = its_type AND p.origin = '' FOR UPDATE;
    IF seen IS NULL OR place = its_origin
       OR EXISTS (SELECT FROM sidings.periodic p WHERE p.name = its_type AND p.origin = its_origin AND p.seen_at > seen) THEN
        RETURN its_origin;
    ELSIF EXISTS (SELECT FROM sidings.job j
                  WHERE j.origin = place AND j."group" = its_type AND j.type = its_type AND j.held IS NULL)
          OR place = sidings.running_origin(ARRAY[its_origin, place]) THEN
        PERFORM sidings.announce(place);
        RETURN place;
    END IF;
    UPDATE sidings.periodic p SET job_origin = its_origin WHERE p.name = its_type AND p.origin = '';
    RETURN its_origin;
END $$;

-- As before, but where partitions were added a message goes by its own key: if that is no text, its group is a hash of it. And
-- a tick of a job per origin comes back in its own: the job's name passed for a key. One per service comes back where it was,
-- if nothing runs where its ticks are, and no other waits there.
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
    -- A tick goes where the other ticks of its type are; where partitions were added, the group of others may be elsewhere.
    old.origin := coalesce((SELECT CASE p.origin WHEN '' THEN coalesce(sidings.running_origin(ARRAY[p.job_origin, old.origin]), p.job_origin,
                                                                 old.origin)
                                   ELSE p.origin END
                            FROM sidings.periodic p
                            WHERE p.name = old.type AND p.origin IN ('', old.origin) ORDER BY p.seen_at DESC LIMIT 1),
                           sidings.place(old.origin, old."group", sidings.key_of(old.type, old.payload)));
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
