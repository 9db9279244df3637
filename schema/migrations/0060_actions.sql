-- runs with 0051
--
-- A job that is released is due from then on; and what is done to many jobs of one state is done to no others; and jobs in
-- a slot of the outbox can be moved. Each function is written out once more; what has changed stands above it.

-- As before, but the job's due time is the release. With none it had been ready since its enqueue, so that nothing told how long
-- it waited: not its wait, which had the time in it for which it was held, nor who stood behind whom in a group whose held jobs
-- were all released.
CREATE OR REPLACE FUNCTION sidings.release_job(job bigint, actor text, reason text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    t record;
BEGIN
    SELECT * INTO t FROM sidings.take_job(job);
    IF t.state <> 'held' THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004', MESSAGE = format('job %s is %s, not held', job, t.state),
            HINT = 'Only held jobs are released; one that backs off can be retried now.';
    END IF;
    -- intervene() has taken the transaction id, so it is older than the position.
    UPDATE sidings.job j
    SET held = NULL, losses = 0, failures = 0, run_at = clock_timestamp(), first_started_at = NULL,
        origin = sidings.origin_of_released(j.type, j.origin),
        position = CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('sidings.job_position') END,
        txid = pg_current_xact_id()
    WHERE j.id = job;
    PERFORM sidings.note_action(actor, 'release', jsonb_build_object('job', job, 'type', (t.taken).type, 'origin', (t.taken).origin,
                                                                     'group', (t.taken)."group"),
                                reason, jsonb_build_object('held', (t.taken).held));
END $$;

-- As before, but with the same due time, and with `still`: whoever has chosen jobs by their state means none that has started, or
-- was released, by the time that he has answered or their turn comes. Who gives four arguments, as earlier releases, finds it too.
DROP FUNCTION sidings.act_on_jobs(text, bigint[], text, text);
CREATE FUNCTION sidings.act_on_jobs(act text, jobs bigint[], actor text, reason text DEFAULT NULL, still text DEFAULT NULL)
RETURNS TABLE (job bigint, state text, code text, refusal text)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET lock_timeout = '2s' AS $$
DECLARE
    origins  text[] := ARRAY(SELECT DISTINCT j.origin FROM sidings.job j WHERE j.id = ANY (jobs) ORDER BY 1);
    here     text;
    theirs   bigint[];  -- those of `jobs` that are there, in their order
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
    PERFORM FROM sidings.executor e WHERE e.id IN (SELECT o.owner FROM sidings.origin o WHERE o.origin = ANY (origins))
    ORDER BY e.id FOR NO KEY UPDATE;
    FOR here, theirs IN
        SELECT j.origin, array_agg(j.id ORDER BY array_position(jobs, j.id)) FROM sidings.job j
        WHERE j.id = ANY (jobs) AND j.origin = ANY (origins) GROUP BY j.origin ORDER BY j.origin
    LOOP
        SELECT * INTO i FROM sidings.intervene(here);
        taken := ARRAY(SELECT j.id FROM sidings.job j WHERE j.id = ANY (theirs) AND j.origin = here FOR UPDATE SKIP LOCKED);
        fitting := ARRAY(SELECT v.id FROM sidings.job_overview v
                         WHERE v.id = ANY (taken) AND (still IS NULL OR v.state = still) AND CASE act
                         WHEN 'retry now' THEN v.state IN ('delayed', 'backing off', 'blocked')
                         WHEN 'release' THEN v.state = 'held' ELSE true END);
        RETURN QUERY
            SELECT v.id, v.state, CASE WHEN v.id <> ALL (fitting) THEN 'SD004' END, CASE WHEN v.id <> ALL (fitting) THEN
                   format('job %s is %s%s', v.id, v.state, CASE
                          WHEN v.state <> still THEN format(' now, not %s', still)
                          WHEN act = 'release' THEN ', not held: Only held jobs are released; one that backs off can be retried now.'
                          WHEN v.state = 'held' THEN ': Release it instead.'
                          WHEN v.state = 'running' THEN ': Wait for its outcome, or cancel it.'
                          ELSE ': It runs when its turn comes.' END) END
            FROM sidings.job_overview v WHERE v.id = ANY (taken);
        answered := answered || taken;
        PERFORM sidings.note_action(actor, act, jsonb_build_object('job', v.id, 'type', v.type, 'origin', v.origin, 'group', v."group"),
                                    reason, CASE act WHEN 'release' THEN jsonb_build_object('held', v.held)
                                                     ELSE jsonb_build_object('found', v.state) END)
        FROM sidings.job_overview v WHERE v.id = ANY (fitting) ORDER BY array_position(theirs, v.id);
        IF act = 'retry now' THEN
            PERFORM sidings.make_due(j) FROM sidings.job j WHERE j.id = ANY (fitting);
        ELSIF act = 'release' THEN
            -- nextval() runs above a materialised sort, and intervene() has taken the transaction id.
            WITH numbered AS MATERIALIZED (
                SELECT d.id, CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('sidings.job_position') END AS position
                FROM (SELECT u.id FROM unnest(theirs) WITH ORDINALITY u (id, n) WHERE u.id = ANY (fitting) ORDER BY u.n) d
            )
            UPDATE sidings.job j
            SET held = NULL, losses = 0, failures = 0, run_at = clock_timestamp(), first_started_at = NULL,
                origin = sidings.origin_of_released(j.type, j.origin), position = n.position, txid = pg_current_xact_id()
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

-- As before, but jobs that SQL has put into a slot of the outbox are moved, and the relay that holds it keeps its lease: it runs
-- no jobs. They were refused, as if they ran there.
CREATE OR REPLACE FUNCTION sidings.move_jobs(origin text, "to" text, actor text, reason text DEFAULT NULL,
                                  lease interval DEFAULT interval '1 minute') RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '2s' AS $$
DECLARE
    o       record;
    holder  record;
    lost    bigint := 0;
    placed  bigint;
    others  bigint;
    slot    CONSTANT boolean := origin ~ '^outbox/([0-9]|1[0-5])$';
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
    IF NOT EXISTS (SELECT FROM sidings.service s
                   WHERE s.timeline = sidings.timeline() AND s.timeline_since + lease < clock_timestamp()) THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004',
            MESSAGE = format('%s may be held under a lease of the server that this one has replaced: no executor has known this one for %s',
                             origin, lease),
            HINT = 'Have an instance of the service running for that long, and try again.';
    END IF;
    IF slot THEN
        o.owner := NULL;
    END IF;
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
    WHERE x.origin = move_jobs.origin AND x.epoch > 0 AND NOT slot;   -- 0: nobody has ever held it, and that remains so
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
