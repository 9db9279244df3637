-- Jobs are moved to where they can run, and requeued where the others of their group have been moved to.
-- runs with 0019

-- As in 0020, but: the target has been held, which its epoch tells. To have a row is not enough: whoever pauses an origin that is
-- misspelt, or cancels a job of it, makes one. And it is no slot of the outbox, which a relay holds: jobs there were no orphans either.
-- The audit tells the epoch that the origin has from then on: as long as it has that, nobody has held it since.
CREATE OR REPLACE FUNCTION sidings.move_jobs(origin text, "to" text, actor text, reason text DEFAULT NULL,
                                  lease interval DEFAULT interval '1 minute') RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '2s' AS $$
DECLARE
    o       record;
    holder  record;
    lost    bigint := 0;
    placed  bigint;
    others  bigint;
BEGIN
    IF origin IS NULL OR "to" IS NULL OR "to" = origin THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = format('jobs of %L cannot be moved to %L', origin, "to"),
            HINT = 'Give two different origins, ''topic/partition''.';
    ELSIF "to" ~ '^outbox/([0-9]|1[0-5])$' THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004', MESSAGE = format('%s is a slot of the outbox, where no job runs', "to"),
            HINT = 'Give an origin of the service''s topics, ''topic/partition''.';
    ELSIF NOT EXISTS (SELECT FROM sidings.origin x WHERE x.origin = move_jobs."to" AND x.epoch > 0) THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004', MESSAGE = format('no executor has ever held %s', "to"),
            HINT = 'Check the name, ''topic/partition''; or start the service that is to run the jobs first.';
    END IF;
    PERFORM sidings.begin_action();
    INSERT INTO sidings.origin (origin)
    SELECT move_jobs.origin WHERE NOT EXISTS (SELECT FROM sidings.origin x WHERE x.origin = move_jobs.origin)
    ON CONFLICT DO NOTHING;
    SELECT x.* INTO o FROM sidings.origin x WHERE x.origin = move_jobs.origin FOR UPDATE;
    IF o.owner IS NOT NULL THEN
        SELECT e.host, e.pid INTO holder FROM sidings.executor e WHERE e.id = o.owner FOR UPDATE;
        IF o.lease_until >= clock_timestamp() OR pg_postmaster_start_time() + lease >= clock_timestamp() THEN
            RAISE EXCEPTION USING ERRCODE = 'SD004',
                MESSAGE = CASE WHEN o.lease_until >= clock_timestamp()
                               THEN format('%s is held by the executor %s (host %s, pid %s)', origin, o.owner, holder.host, holder.pid)
                               ELSE format('%s may be held: Postgres has been up for less than %s', origin, lease) END,
                HINT = 'Its jobs run there. Only those of an origin that nobody holds are moved.';
        END IF;
        WITH cut AS (
            UPDATE sidings.job j
            SET losses = LEAST(j.losses + 1, 32767), attempt = j.attempt + 1
            FROM sidings.executor e, unnest(e.running) r (id)
            WHERE e.id = o.owner AND j.id = r.id AND j.origin = o.origin
            RETURNING j.*
        )
        INSERT INTO sidings.job_history (job_id, epoch, enqueued_at, due_at, finished_at, executor, attempt, outcome, priority,
                                         type, origin, "group", correlation_id)
        SELECT c.id, o.epoch, c.enqueued_at, c.run_at, clock_timestamp(), o.owner, c.attempt - 1, 'lost', c.priority, c.type,
               c.origin, c."group", c.headers ->> 'correlation_id'
        FROM cut c;
        GET DIAGNOSTICS lost = ROW_COUNT;
        UPDATE sidings.executor e
        SET fence = e.fence + 1,
            running = ARRAY(SELECT r FROM unnest(e.running) r
                            WHERE NOT EXISTS (SELECT FROM sidings.job j WHERE j.id = r AND j.origin = o.origin))
        WHERE e.id = o.owner;
    END IF;
    UPDATE sidings.origin x SET owner = NULL, lease_until = NULL, epoch = x.epoch + 1
    WHERE x.origin = move_jobs.origin AND x.epoch > 0;   -- 0: nobody has ever held it, and that remains so
    SELECT x.epoch INTO o.epoch FROM sidings.origin x WHERE x.origin = move_jobs.origin;
    -- First, so that no tick becomes a job there from now on. Lock order: origin, periodic.
    UPDATE sidings.periodic p SET job_origin = move_jobs."to" WHERE p.job_origin = move_jobs.origin AND p.origin = '';
    -- nextval() runs above a materialised sort, and the transaction id has been taken above.
    WITH numbered AS MATERIALIZED (
        SELECT d.id, CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('sidings.job_position') END AS position
        FROM (SELECT j.id FROM sidings.job j
              WHERE j.origin = move_jobs.origin AND j.position IS NOT NULL ORDER BY j.position) d
    )
    UPDATE sidings.job j SET origin = move_jobs."to", position = n.position, txid = pg_current_xact_id()
    FROM numbered n WHERE j.id = n.id;
    GET DIAGNOSTICS placed = ROW_COUNT;
    UPDATE sidings.job j SET origin = move_jobs."to" WHERE j.origin = move_jobs.origin AND j.position IS NULL;
    GET DIAGNOSTICS others = ROW_COUNT;
    PERFORM sidings.announce("to");
    PERFORM sidings.note_action(actor, 'move', jsonb_build_object('origin', origin, 'to', "to"), reason,
                                jsonb_build_object('jobs', placed + others, 'lost', lost, 'former_owner', o.owner,
                                                   'epoch', o.epoch));
    RETURN placed + others;
END $$;

CREATE INDEX audit_move ON sidings.audit ((target ->> 'origin'), id) WHERE action = 'move';

-- As in 0025, and: a job whose origin was emptied by a move follows it. It came back where nothing runs, and out of its group's order.
CREATE OR REPLACE FUNCTION sidings.requeue_job(
    job bigint, actor text, reason text DEFAULT NULL, force boolean DEFAULT false, finished_at timestamptz DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '2s' AS $$
DECLARE
    old    record;
    before record;
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
    -- Where partitions were added, its group may be elsewhere (0010); a tick goes where the other ticks of its type are.
    old.origin := coalesce((SELECT p.job_origin FROM sidings.periodic p WHERE p.name = old.type AND p.origin = ''),
                           sidings.place(old.origin, old."group"));
    -- Where its origin was emptied by a move, and nobody has held it since, it follows the others of its group: with each move that came
    -- after that one and emptied the place where they were, so it ends, though they may have come back.
    SELECT a.id, a.target ->> 'to' AS origin INTO moved
    FROM sidings.audit a JOIN sidings.origin x ON x.origin = old.origin AND x.owner IS NULL
    WHERE a.action = 'move' AND a.target ->> 'origin' = old.origin AND (a.detail ->> 'epoch')::bigint = x.epoch
    ORDER BY a.id DESC LIMIT 1;
    WHILE FOUND LOOP
        old.origin := moved.origin;
        SELECT a.id, a.target ->> 'to' AS origin INTO moved
        FROM sidings.audit a WHERE a.action = 'move' AND a.target ->> 'origin' = old.origin AND a.id > moved.id
        ORDER BY a.id LIMIT 1;
    END LOOP;
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
