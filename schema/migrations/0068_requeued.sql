-- runs with 0051
--
-- A job that is requeued brings all of its headers back, and the key by which receivers know its effects: else what had been given up
-- after its call got through (a timeout, a lost answer) took effect twice. Only rows with a payload have headers, as of those only a
-- job can be requeued; earlier releases, which name their columns, leave them out, and of what they end the correlation id comes back.
-- Each function is written out once more; what has changed stands above it.
--
-- The column locks the history for a moment, and waits for whoever reads it, for two seconds at a time (schema/migrate.py). A table
-- of their own would not, but would need a retention and an erasure of its own.
ALTER TABLE sidings.job_history ADD COLUMN headers jsonb;

-- As before, with what 0061 has set, but with the headers.
CREATE OR REPLACE FUNCTION sidings.end_jobs(ids bigint[], its_outcome sidings.outcome, actor text, reason text, its_owner uuid,
                                 its_epoch bigint, running bigint[]) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    ended bigint;
BEGIN
    WITH gone AS (
        DELETE FROM sidings.job j WHERE j.id = ANY (ids) RETURNING j.*
    ), recorded AS (
        INSERT INTO sidings.job_history (job_id, epoch, enqueued_at, due_at, finished_at, executor, attempt, outcome, priority,
                                         type, origin, "group", error_class, error_message, correlation_id, headers, payload)
        SELECT g.id, CASE WHEN g.id = ANY (running) THEN its_epoch END, g.enqueued_at, g.run_at, clock_timestamp(),
               CASE WHEN g.id = ANY (running) THEN its_owner END, g.attempt, its_outcome, g.priority, g.type, g.origin,
               g."group", initcap(its_outcome::text), concat_ws(': ', 'by ' || actor, reason),
               g.headers ->> 'correlation_id', g.headers, coalesce(g.payload, 'null')
        FROM gone g
        RETURNING 1
    )
    SELECT count(*) INTO ended FROM recorded;
    RETURN ended;
END $$;

-- As before, but with the headers.
CREATE OR REPLACE FUNCTION sidings.withdraw(
    type       text,
    job_id     bigint DEFAULT NULL,
    unique_key text DEFAULT NULL,
    history    boolean DEFAULT true
) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET enable_seqscan = off SET jit = off AS $$
DECLARE
    problem text;
    remedy  text;
    gone_id bigint;
BEGIN
    CASE
        WHEN type IS NULL OR type = '' THEN
            problem := 'the job to be withdrawn has no type';
            remedy := 'Give the name of its handler, e.g. ''remind''.';
        WHEN num_nonnulls(job_id, unique_key) = 0 THEN
            problem := format('of the job %L to be withdrawn neither job_id nor unique_key is given', type);
            remedy := 'Give one of them.';
        WHEN num_nonnulls(job_id, unique_key) = 2 THEN
            problem := format('of the job %L to be withdrawn both job_id and unique_key are given', type);
            remedy := 'Give one of them.';
        WHEN unique_key = '' THEN
            problem := format('the unique_key of the job %L is empty', type);
            remedy := 'Give the one that it was enqueued with.';
        WHEN history IS NULL THEN
            problem := format('history is NULL for the job %L', type);
            remedy := 'Give true, or false if its type has history=False.';
        ELSE
            WITH gone AS (
                DELETE FROM sidings.job j
                WHERE j.id = coalesce(withdraw.job_id, (SELECT k.id FROM sidings.job k
                                                        WHERE k.type = withdraw.type AND k.unique_key = withdraw.unique_key))
                  AND j.type = withdraw.type AND num_nonnulls(j.position, j.held) = 0 AND j.attempt = 1
                RETURNING j.*
            ), told AS (
                INSERT INTO sidings.job_history
                    (job_id, enqueued_at, due_at, finished_at, attempt, outcome, priority, type, origin, "group", error_class,
                     error_message, correlation_id, headers, payload)
                SELECT g.id, g.enqueued_at, g.run_at, clock_timestamp(), g.attempt, 'cancelled', g.priority, g.type, g.origin,
                       g."group", 'Cancelled', 'withdrawn in a transaction of the application', g.headers ->> 'correlation_id',
                       g.headers, coalesce(g.payload, 'null')   -- without any it is erased, and not requeued
                FROM gone g WHERE withdraw.history
            )
            SELECT g.id INTO gone_id FROM gone g;
            RETURN FOUND;
    END CASE;
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = problem, HINT = remedy;
END $$;

-- As before, but with all headers of the job, and with its idempotency key, unless it has been requeued itself and has one: as
-- `Job.idempotency_key` in Python.
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
            jsonb_build_object('sidings-idempotency-key',
                               old.job_id || '-' || (extract(epoch FROM old.enqueued_at) * 1000000)::bigint)
            || coalesce(old.headers, jsonb_strip_nulls(jsonb_build_object('correlation_id', old.correlation_id))))
    RETURNING id INTO new_id;
    PERFORM sidings.announce(old.origin);
    PERFORM sidings.note_action(actor, 'requeue', jsonb_build_object('job', job, 'type', old.type, 'origin', old.origin,
                                                                     'group', old."group"),
                                reason, jsonb_build_object('found', old.outcome, 'new_job', new_id));
    RETURN new_id;
END $$;
