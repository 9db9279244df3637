-- runs with 0051
--
-- A job that was given up and that another one follows (Retry(on_exhausted=refund)) ends as `followed`: as `discarded` nobody could tell
-- it from those that a person has to look at and requeue. It locks no table. This transaction must not use the value yet; bodies in
-- plpgsql only name it. Each function is written out once more; what has changed stands above it.
ALTER TYPE sidings.outcome ADD VALUE IF NOT EXISTS 'followed' AFTER 'discarded';

-- As before, but a job that was followed has ended, and its hint says what requeueing it means.
CREATE OR REPLACE FUNCTION sidings.no_such_job(job bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    last record;
    at   text;
BEGIN
    SELECT h.outcome, h.finished_at INTO last FROM sidings.job_history h
    WHERE h.job_id = job ORDER BY h.attempt DESC, h.finished_at DESC LIMIT 1;
    at := to_char(last.finished_at, 'YYYY-MM-DD HH24:MI:SS OF');
    IF EXISTS (SELECT FROM sidings.job j WHERE j.id = job) THEN
        RAISE EXCEPTION USING ERRCODE = 'lock_not_available', MESSAGE = format('job %s has just been moved to another origin', job),
            HINT = 'Try again.';
    ELSIF last.outcome IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'SD003', MESSAGE = format('there is no job %s, and the history knows of none', job),
            HINT = 'Check the number. The history keeps what history_days says, and nothing of types with history=False that ran well.';
    ELSIF last.outcome NOT IN ('succeeded', 'discarded', 'followed', 'cancelled', 'superseded') THEN
        RAISE EXCEPTION USING ERRCODE = 'SD003',
            MESSAGE = format('there is no job %s any more; its last attempt on record was %s at %s', job, last.outcome, at),
            HINT = 'A type with history=False leaves no record of what succeeds or is superseded.';
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'SD003', MESSAGE = format('there is no job %s any more: %s at %s', job, last.outcome, at),
        HINT = CASE last.outcome WHEN 'followed' THEN 'Another job has followed it. It can be requeued; then both take effect.'
                                 ELSE 'A job that was discarded, cancelled or superseded can be requeued.' END;
END $$;

-- As before, but a job that was followed can be requeued, by its number or where a person names that outcome.
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
      AND h.outcome IN ('succeeded', 'discarded', 'followed', 'cancelled', 'superseded');
    IF NOT FOUND THEN
        SELECT h.* INTO old FROM sidings.job_history h
        WHERE h.job_id = job AND h.outcome IN ('succeeded', 'discarded', 'followed', 'cancelled', 'superseded')
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
