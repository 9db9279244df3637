-- Actions of persons that keep executors waiting for a moment only, and that leave a periodic job in one origin.
-- runs with 0019

-- Every action begins with this. An executor waits until the transaction of the action ends, all of them for the pause of a type: in one
-- that was left open, nothing ran any more, and after a lease instances ended. Now its session is ended after 5 s in which it does
-- nothing, which is before anybody stops a handler for the sake of its lease.
CREATE OR REPLACE FUNCTION sidings.begin_action() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004', MESSAGE = 'administration needs the isolation level READ COMMITTED',
            HINT = 'What it read before it waited for a lock would be out of date. Call it outside of a transaction; where another level '
                   'is the default, behind BEGIN ISOLATION LEVEL READ COMMITTED.';
    END IF;
    IF current_setting('idle_in_transaction_session_timeout')::interval NOT BETWEEN interval '1 ms' AND interval '5 s' THEN
        PERFORM set_config('idle_in_transaction_session_timeout', '5s', true);
    END IF;
END $$;

-- As in 0006, but for begin_action().
CREATE OR REPLACE FUNCTION sidings.intervene(its_origin text, OUT owner uuid, OUT epoch bigint, OUT running bigint[])
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
BEGIN
    PERFORM sidings.begin_action();
    INSERT INTO sidings.origin (origin)
    SELECT its_origin WHERE NOT EXISTS (SELECT FROM sidings.origin o WHERE o.origin = its_origin)
    ON CONFLICT DO NOTHING;
    SELECT o.owner, o.epoch INTO owner, epoch FROM sidings.origin o WHERE o.origin = its_origin FOR NO KEY UPDATE;
    UPDATE sidings.executor e SET fence = e.fence + 1 WHERE e.id = intervene.owner RETURNING e.running INTO running;
    running := coalesce(running, '{}');
    PERFORM sidings.announce(its_origin);
END $$;

-- As in 0006, but for begin_action().
CREATE OR REPLACE FUNCTION sidings.take_target(its_type text, its_origin text, its_group text) RETURNS text
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
BEGIN
    IF its_type <> '' AND num_nonnulls(its_origin, its_group) = 0 THEN
        PERFORM sidings.begin_action();
        LOCK TABLE sidings.executor IN EXCLUSIVE MODE;
        UPDATE sidings.executor SET fence = fence + 1;
        PERFORM sidings.announce('');
        RETURN 'type';
    ELSIF its_type IS NULL AND its_origin <> '' AND its_group IS DISTINCT FROM '' THEN
        PERFORM sidings.intervene(its_origin);
        RETURN CASE WHEN its_group IS NULL THEN 'origin' ELSE 'group' END;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'it is not clear what is meant',
        HINT = 'Give a type, or an origin, or an origin and a group.';
END $$;

-- As in 0006, but for begin_action(), and: ticks of a periodic job meet in one origin, or two of them could run at once.
CREATE OR REPLACE FUNCTION sidings.requeue_job(job bigint, actor text, reason text DEFAULT NULL, force boolean DEFAULT false)
RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '2s' AS $$
DECLARE
    old    record;
    before record;
    new_id bigint;
BEGIN
    PERFORM sidings.begin_action();
    PERFORM pg_advisory_xact_lock(hashtextextended('sidings.requeue', job));   -- two at once: the second sees the first
    IF EXISTS (SELECT FROM sidings.job j WHERE j.id = job) THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004', MESSAGE = format('job %s has not ended', job),
            HINT = 'Retry it now; release it if it is held.';
    END IF;
    SELECT h.* INTO old FROM sidings.job_history h
    WHERE h.job_id = job AND h.outcome IN ('succeeded', 'discarded', 'cancelled', 'superseded')
    ORDER BY h.finished_at DESC LIMIT 1;
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

-- As in 0006, but for begin_action(), and: the next ticks of periodic jobs follow those that are moved, and wait for them there.
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
    ELSIF NOT EXISTS (SELECT FROM sidings.origin x WHERE x.origin = move_jobs."to") THEN
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
    WHERE x.origin = move_jobs.origin;
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
                                jsonb_build_object('jobs', placed + others, 'lost', lost, 'former_owner', o.owner));
    RETURN placed + others;
END $$;

-- As in 0018, but: of a job that is no more it does not tell how it ended. For each of them that took 20 ms or more in a history of
-- millions, under all these locks: while somebody retried 2,000 jobs of which half had run meanwhile, nothing ran for a minute,
-- instances ended, and the call failed.
CREATE OR REPLACE FUNCTION sidings.act_on_jobs(act text, jobs bigint[], actor text, reason text DEFAULT NULL)
RETURNS TABLE (job bigint, state text, code text, refusal text)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET lock_timeout = '2s' AS $$
DECLARE
    origins  text[] := ARRAY(SELECT DISTINCT j.origin FROM sidings.job j WHERE j.id = ANY (jobs) ORDER BY 1);
    here     text;
    taken    bigint[];
    fitting  bigint[];
    answered bigint[] := '{}';
    i        record;
BEGIN
    IF act NOT IN ('cancel', 'discard', 'retry now', 'release') THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = format('%L is nothing that is done to many jobs', act),
            HINT = 'Give cancel, discard, retry now or release.';
    END IF;
    -- All of them first: whoever waits for an origin holds no executor's row, for which the origin's own holder could wait.
    PERFORM FROM sidings.origin o WHERE o.origin = ANY (origins) ORDER BY o.origin FOR NO KEY UPDATE;
    FOREACH here IN ARRAY origins LOOP
        SELECT * INTO i FROM sidings.intervene(here);
        taken := ARRAY(SELECT j.id FROM sidings.job j WHERE j.id = ANY (jobs) AND j.origin = here FOR UPDATE SKIP LOCKED);
        fitting := ARRAY(SELECT v.id FROM sidings.job_overview v WHERE v.id = ANY (taken) AND CASE act
                         WHEN 'retry now' THEN v.state IN ('delayed', 'backing off', 'blocked')
                         WHEN 'release' THEN v.state = 'held' ELSE true END);
        RETURN QUERY
            SELECT v.id, v.state, CASE WHEN v.id <> ALL (fitting) THEN 'SD004' END, CASE WHEN v.id <> ALL (fitting) THEN
                   format('job %s is %s%s', v.id, v.state, CASE
                          WHEN act = 'release' THEN ', not held: Only held jobs are released; one that backs off can be retried now.'
                          WHEN v.state = 'held' THEN ': Release it instead.'
                          WHEN v.state = 'running' THEN ': Wait for its outcome, or cancel it.'
                          ELSE ': It runs when its turn comes.' END) END
            FROM sidings.job_overview v WHERE v.id = ANY (taken);
        answered := answered || taken;
        PERFORM sidings.note_action(actor, act, jsonb_build_object('job', v.id, 'type', v.type, 'origin', v.origin, 'group', v."group"),
                                    reason, CASE act WHEN 'release' THEN jsonb_build_object('held', v.held)
                                                     ELSE jsonb_build_object('found', v.state) END)
        FROM sidings.job_overview v WHERE v.id = ANY (fitting) ORDER BY array_position(jobs, v.id);
        IF act = 'retry now' THEN
            PERFORM sidings.make_due(j) FROM sidings.job j WHERE j.id = ANY (fitting);
        ELSIF act = 'release' THEN
            -- nextval() runs above a materialised sort, and intervene() has taken the transaction id.
            WITH numbered AS MATERIALIZED (
                SELECT d.id, CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('sidings.job_position') END AS position
                FROM (SELECT u.id FROM unnest(jobs) WITH ORDINALITY u (id, n) WHERE u.id = ANY (fitting) ORDER BY u.n) d
            )
            UPDATE sidings.job j
            SET held = NULL, losses = 0, failures = 0, run_at = NULL, first_started_at = NULL, position = n.position,
                txid = pg_current_xact_id()
            FROM numbered n WHERE j.id = n.id;
        ELSE
            PERFORM sidings.end_jobs(fitting, CASE act WHEN 'cancel' THEN 'cancelled'::sidings.outcome ELSE 'discarded' END, actor, reason,
                                     i.owner, i.epoch, i.running);
        END IF;
    END LOOP;
    RETURN QUERY
        SELECT u.id, NULL::text, CASE WHEN s.id IS NULL THEN 'SD003' ELSE '55P03' END,
               CASE WHEN s.id IS NULL THEN format('there is no job %s any more, or never was: Look at what its attempts came to.', u.id)
                    ELSE format('job %s is being changed by somebody else: Try again.', u.id) END
        FROM unnest(jobs) u (id) LEFT JOIN sidings.job s ON s.id = u.id
        WHERE u.id <> ALL (answered);
END $$;
