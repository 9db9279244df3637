-- Administration: what a person may do to jobs while executors run, and the record of it (docs/administration.md).
--
-- Each action is one function, called in autocommit; plpgsql, because every statement of it gets a fresh snapshot. An
-- action that changes jobs behind their holder's back begins with sidings.intervene().
--
-- Lock order: origins by name, executors, jobs, periodic, the rest. But move_jobs() comes to periodic before the jobs that
-- it moves, whose origin it has for itself; and requeue_job() takes origins along the moves, FOR KEY SHARE.
--
-- SD003: no such job. SD004: the state of things does not allow it. 55P03 (lock_timeout), 40P01: nothing has changed, try
-- again.

-- What is not to start. Each row makes sense alone. A group is one of an origin.
CREATE TABLE sidings.pause (
    paused_at timestamptz NOT NULL DEFAULT now(),
    kind      text NOT NULL,
    type      text,
    origin    text,
    "group"   text,
    paused_by text NOT NULL,
    reason    text NOT NULL,
    CONSTRAINT pause_target UNIQUE NULLS NOT DISTINCT (kind, type, origin, "group"),
    CONSTRAINT pause_kind CHECK (kind IN ('type', 'origin', 'group')),
    CONSTRAINT pause_names_its_target CHECK ((type IS NOT NULL) = (kind = 'type')
                                             AND (origin IS NOT NULL) = (kind IN ('origin', 'group'))
                                             AND ("group" IS NOT NULL) = (kind = 'group'))
);

-- Who did what, to what, and why. One row per action; nothing here deletes it.
CREATE TABLE sidings.audit (
    id       bigint GENERATED ALWAYS AS IDENTITY,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor    text NOT NULL,
    action   text NOT NULL,
    target   jsonb NOT NULL,               -- {"job": …} | {"origin": …, "group": …} | {"type": …}
    reason   text,
    detail   jsonb,
    -- Whom it concerned, and what his fence was bumped to by the action's transaction. So an executor whose fence has grown knows
    -- of each number why; of one that no row explains (a takeover, a pause) it knows nothing, and reads everything anew.
    executor uuid,
    fence    bigint,
    CONSTRAINT audit_pkey PRIMARY KEY (id)
);
-- What was done to one job; "was it requeued already".
CREATE INDEX audit_job ON sidings.audit (((target ->> 'job')::bigint)) WHERE target ? 'job';
-- Why a fence was bumped.
CREATE INDEX audit_fence ON sidings.audit (executor, fence) WHERE executor IS NOT NULL;
-- Where the jobs of an origin were moved to.
CREATE INDEX audit_move ON sidings.audit ((target ->> 'origin'), id) WHERE action = 'move';

-- docs/job-states.md, in one word. A job whose executor is about to start it counts as running.
CREATE VIEW sidings.job_overview AS
SELECT j.id, j.type, j.origin, j."group",
       CASE WHEN j.held IS NOT NULL THEN 'held'
            WHEN j.id IN (SELECT unnest(e.running) FROM sidings.executor e) THEN 'running'
            WHEN j.position IS NULL THEN 'delayed'
            WHEN j.run_at = 'infinity' THEN 'blocked'
            WHEN j.run_at > statement_timestamp() THEN 'backing off'
            ELSE 'waiting' END AS state,
       j.priority, j.attempt, j.failures, j.losses, j.enqueued_at, j.first_started_at, j.run_at, j.position, j.policy,
       j.unique_key, j.held, j.error, j.headers, j.payload
FROM sidings.job j;

-- Wakes the executors that listen; the others learn of it at their next read. '' is for all.
CREATE FUNCTION sidings.announce(its_origin text) RETURNS void
LANGUAGE sql AS $$ SELECT pg_notify(rtrim('sidings.', '.') || '_committed', its_origin) $$;

-- Every action begins with this. An executor waits until the transaction of the action ends, all of them for the pause of a
-- type: if it were left open, nothing would run any more, and after a lease instances would end. So its session is ended
-- after 5 s in which it does nothing, which is before anybody stops a handler for the sake of its lease.
CREATE FUNCTION sidings.begin_action() RETURNS void
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

-- Steps 1 and 2 of every action on jobs of an origin. Returns who holds it and what runs there: all of the holder's jobs.
-- (1) The origin's row: waits for a takeover, and takes no lease away (no key update: FOR KEY SHARE goes on; a renewal that
--     comes now skips it once). It is made where nobody has held the origin yet, so that whoever acquires it now waits.
-- (2) The holder's row: waits for its cycle in flight, and voids every later one that was planned without knowing of this.
--     The holder then reads everything anew before it starts anything more.
-- (3) is the caller's: jobs, history, audit. What it cancels does not start after its commit, unless it was in `running`.
CREATE FUNCTION sidings.intervene(its_origin text, OUT owner uuid, OUT epoch bigint, OUT running bigint[])
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

-- Until the end of the caller's transaction no move empties the origin; one that was about to has ended, as the caller's
-- next statement sees. The lock keeps no renewal away.
CREATE FUNCTION sidings.stay_origin(its_origin text) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
BEGIN
    INSERT INTO sidings.origin (origin)
    SELECT its_origin WHERE NOT EXISTS (SELECT FROM sidings.origin o WHERE o.origin = its_origin)
    ON CONFLICT DO NOTHING;
    PERFORM FROM sidings.origin o WHERE o.origin = its_origin FOR KEY SHARE;
END $$;

-- As intervene(), for what may take longer than a lease: that goes on being renewed. Whoever intervenes here meanwhile
-- waits for the holder's row; where there is none, for the rows of the jobs.
CREATE FUNCTION sidings.intervene_for_long(its_origin text, OUT owner uuid, OUT epoch bigint, OUT running bigint[])
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
BEGIN
    PERFORM sidings.begin_action();
    PERFORM sidings.stay_origin(its_origin);
    SELECT o.owner, o.epoch INTO owner, epoch FROM sidings.origin o WHERE o.origin = its_origin;
    UPDATE sidings.executor e SET fence = e.fence + 1 WHERE e.id = intervene_for_long.owner RETURNING e.running INTO running;
    running := coalesce(running, '{}');
    PERFORM sidings.announce(its_origin);
END $$;

-- One row of the audit. With executor and fence, where the action changes nothing but what its target names, after
-- intervene() in its origin. Not for 'reset', whose target is not all that it concerns; nor for 'requeue', which has not
-- intervened: the number would be another's.
CREATE FUNCTION sidings.note_action(actor text, action text, target jsonb, reason text, detail jsonb DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    e record;
BEGIN
    IF coalesce(actor, '') = '' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = format('%s: nobody is named who does it', action),
            HINT = 'Give actor => ''the name of a person or program''.';
    END IF;
    SELECT x.id, x.fence INTO e FROM sidings.origin o JOIN sidings.executor x ON x.id = o.owner
    WHERE o.origin = target ->> 'origin'
          AND action IN ('cancel', 'discard', 'retry now', 'release', 'release group', 'skip head', 'clear group');
    INSERT INTO sidings.audit (actor, action, target, reason, detail, executor, fence)
    VALUES (actor, action, target, reason, detail, e.id, e.fence);
END $$;

-- Raises: there is no such job, and what the history knows of its end.
CREATE FUNCTION sidings.no_such_job(job bigint) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    last record;
BEGIN
    SELECT h.outcome, h.finished_at INTO last FROM sidings.job_history h
    WHERE h.job_id = job ORDER BY h.attempt DESC, h.finished_at DESC LIMIT 1;
    IF EXISTS (SELECT FROM sidings.job j WHERE j.id = job) THEN
        RAISE EXCEPTION USING ERRCODE = 'lock_not_available', MESSAGE = format('job %s has just been moved to another origin', job),
            HINT = 'Try again.';
    ELSIF last.outcome IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'SD003', MESSAGE = format('there is no job %s, and the history knows of none', job),
            HINT = 'Check the number. The history keeps what history_days says, and nothing of types with history=False that ran well.';
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'SD003', MESSAGE = format('there is no job %s any more: %s at %s', job, last.outcome,
                                                              to_char(last.finished_at, 'YYYY-MM-DD HH24:MI:SS OF')),
        HINT = 'A job that was discarded, cancelled or superseded can be requeued.';
END $$;

-- Deletes jobs whose rows the caller has locked, and writes their terminal rows of the history, with payload.
CREATE FUNCTION sidings.end_jobs(ids bigint[], its_outcome sidings.outcome, actor text, reason text, its_owner uuid,
                                 its_epoch bigint, running bigint[]) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    ended bigint;
BEGIN
    WITH gone AS (
        DELETE FROM sidings.job j WHERE j.id = ANY (ids) RETURNING j.*
    ), recorded AS (
        INSERT INTO sidings.job_history (job_id, epoch, enqueued_at, due_at, finished_at, executor, attempt, outcome, priority,
                                         type, origin, "group", error_class, error_message, correlation_id, payload)
        SELECT g.id, CASE WHEN g.id = ANY (running) THEN its_epoch END, g.enqueued_at, g.run_at, clock_timestamp(),
               CASE WHEN g.id = ANY (running) THEN its_owner END, g.attempt, its_outcome, g.priority, g.type, g.origin,
               g."group", initcap(its_outcome::text), concat_ws(': ', 'by ' || actor, reason),
               g.headers ->> 'correlation_id', g.payload
        FROM gone g
        RETURNING 1
    )
    SELECT count(*) INTO ended FROM recorded;
    RETURN ended;
END $$;

-- Intervenes in a job's origin and locks the job's row.
CREATE FUNCTION sidings.take_job(job bigint, OUT taken sidings.job, OUT state text, OUT owner uuid, OUT epoch bigint,
                                 OUT running bigint[])
LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '2s' AS $$
DECLARE
    its_origin text;
BEGIN
    SELECT j.origin INTO its_origin FROM sidings.job j WHERE j.id = job;
    IF FOUND THEN
        SELECT i.owner, i.epoch, i.running INTO owner, epoch, running FROM sidings.intervene(its_origin) i;
        SELECT j.* INTO taken FROM sidings.job j WHERE j.id = job AND j.origin = its_origin FOR UPDATE;
    END IF;
    IF taken.id IS NULL THEN
        PERFORM sidings.no_such_job(job);
    END IF;
    SELECT v.state INTO state FROM sidings.job_overview v WHERE v.id = job;
END $$;

-- The end of one job, whatever it is called.
CREATE FUNCTION sidings.end_job(job bigint, action text, its_outcome sidings.outcome, actor text, reason text) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    t record;
BEGIN
    SELECT * INTO t FROM sidings.take_job(job);
    PERFORM sidings.end_jobs(ARRAY[job], its_outcome, actor, reason, t.owner, t.epoch, t.running);
    PERFORM sidings.note_action(actor, action, jsonb_build_object('job', job, 'type', (t.taken).type, 'origin', (t.taken).origin,
                                                                  'group', (t.taken)."group"),
                                reason, jsonb_build_object('found', t.state));
    RETURN t.state;
END $$;

-- The job ends as cancelled, in whatever state it is: its row goes, its payload stays in the history. If it runs, its
-- holder sees within a second that it is gone and cancels the handler; what the attempt still reports matches nothing,
-- and a transactional handler's effects roll back. Returns the state in which it was found.
CREATE FUNCTION sidings.cancel_job(job bigint, actor text, reason text DEFAULT NULL) RETURNS text
LANGUAGE sql AS $$ SELECT sidings.end_job(job, 'cancel', 'cancelled', actor, reason) $$;

-- The same, as discarded.
CREATE FUNCTION sidings.discard_job(job bigint, actor text, reason text DEFAULT NULL) RETURNS text
LANGUAGE sql AS $$ SELECT sidings.end_job(job, 'discard', 'discarded', actor, reason) $$;

-- A locked job runs now. In its group it keeps its place; a delayed one is promoted at once. One that had given up starts
-- its policy's count anew.
CREATE FUNCTION sidings.make_due(job sidings.job) RETURNS void
LANGUAGE sql AS $$
    UPDATE sidings.job j
    SET run_at = CASE WHEN j.position IS NULL THEN clock_timestamp() END,
        failures = CASE WHEN j.run_at = 'infinity' THEN 0 ELSE j.failures END,
        first_started_at = CASE WHEN j.run_at = 'infinity' THEN NULL ELSE j.first_started_at END
    WHERE j.id = job.id
$$;

-- A job that is delayed, backs off or is blocked runs as soon as its group and a worker allow. Returns the state in which
-- it was found.
CREATE FUNCTION sidings.retry_job_now(job bigint, actor text, reason text DEFAULT NULL) RETURNS text
LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    t record;
BEGIN
    SELECT * INTO t FROM sidings.take_job(job);
    IF t.state NOT IN ('delayed', 'backing off', 'blocked') THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004', MESSAGE = format('job %s is %s', job, t.state),
            HINT = CASE t.state WHEN 'held' THEN 'Release it instead.' WHEN 'running' THEN 'Wait for its outcome, or cancel it.'
                                ELSE 'It runs when its turn comes.' END;
    END IF;
    PERFORM sidings.make_due(t.taken);
    PERFORM sidings.note_action(actor, 'retry now', jsonb_build_object('job', job, 'type', (t.taken).type,
                                                                       'origin', (t.taken).origin, 'group', (t.taken)."group"),
                                reason, jsonb_build_object('found', t.state));
    RETURN t.state;
END $$;

-- Where a job that is released or requeued belongs: in `its_origin`. But while another tick of its periodic job waits or
-- runs elsewhere, it goes there, or the two could run at once; and else the next ticks follow it. A tick that is fired,
-- or a move, waits until the caller's transaction ends. Lock order: origins, executors, jobs, periodic. Plan:
-- periodic_pkey, job_group.
CREATE FUNCTION sidings.origin_of_released(its_type text, its_origin text) RETURNS text
LANGUAGE plpgsql SET enable_seqscan = off SET lock_timeout = '2s' AS $$
DECLARE
    place text;
BEGIN
    SELECT p.job_origin INTO place FROM sidings.periodic p WHERE p.name = its_type AND p.origin = '' FOR UPDATE;
    IF place IS NULL OR place = its_origin THEN
        RETURN its_origin;
    ELSIF EXISTS (SELECT FROM sidings.job j
                  WHERE j.origin = place AND j."group" = its_type AND j.type = its_type AND j.held IS NULL) THEN
        PERFORM sidings.announce(place);
        RETURN place;
    END IF;
    UPDATE sidings.periodic p SET job_origin = its_origin WHERE p.name = its_type AND p.origin = '';
    RETURN its_origin;
END $$;

-- A held job waits again, at the end of its group's order, with a clean slate.
CREATE FUNCTION sidings.release_job(job bigint, actor text, reason text DEFAULT NULL) RETURNS void
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
    SET held = NULL, losses = 0, failures = 0, run_at = NULL, first_started_at = NULL,
        origin = sidings.origin_of_released(j.type, j.origin),
        position = CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('sidings.job_position') END,
        txid = pg_current_xact_id()
    WHERE j.id = job;
    PERFORM sidings.note_action(actor, 'release', jsonb_build_object('job', job, 'type', (t.taken).type, 'origin', (t.taken).origin,
                                                                     'group', (t.taken)."group"),
                                reason, jsonb_build_object('held', (t.taken).held));
END $$;

-- What is done to one job, done to many at once. One by one, each as a transaction of its own, they void all that the
-- holder plans meanwhile: while somebody released 2,000 held jobs, in half a minute, hardly any other job ran.
--   act  'cancel', 'discard', 'retry now' or 'release', as the functions for one job
-- In the order of `jobs`, which counts for 'release'. Returns a row for each of them: the state in which it was found;
-- where nothing was done to it, the SQLSTATE that the function for one job raises, and why. Of a job that is no more it
-- does not tell how it ended: to look that up takes 20 ms in a history of millions, for each, under all these locks. Lock
-- order: all origins (by name); then of each its holder, jobs, periodic. A job that somebody else has locked is left as it
-- is.
CREATE FUNCTION sidings.act_on_jobs(act text, jobs bigint[], actor text, reason text DEFAULT NULL)
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
    FOR here, theirs IN
        SELECT j.origin, array_agg(j.id ORDER BY array_position(jobs, j.id)) FROM sidings.job j
        WHERE j.id = ANY (jobs) AND j.origin = ANY (origins) GROUP BY j.origin ORDER BY j.origin
    LOOP
        SELECT * INTO i FROM sidings.intervene(here);
        taken := ARRAY(SELECT j.id FROM sidings.job j WHERE j.id = ANY (theirs) AND j.origin = here FOR UPDATE SKIP LOCKED);
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
            SET held = NULL, losses = 0, failures = 0, run_at = NULL, first_started_at = NULL,
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

-- A job that ended without success comes back from the history as a new job, at the end of its group's order: type, origin,
-- group, priority, payload and correlation id are the old ones. It runs in any case, so it is serial and has no unique key.
-- No intervention: readers find new jobs by themselves. Returns the new id.
--   finished_at   of its last attempt, where that is known, as where many are requeued. The history's index on the ids of
--                 jobs leads to all pages of the hours in which it may have ended; that on this time, along which the rows
--                 lie, to a few.
-- Ticks of a periodic job meet in one origin, or two of them could run at once. A job whose origin was emptied by a move
-- follows it: else it would come back where nothing runs, and out of its group's order. A move that is under way is waited
-- for, and one that begins now waits: else neither would see the other's jobs. Lock order: origins (FOR KEY SHARE, along
-- the moves), then periodic.
CREATE FUNCTION sidings.requeue_job(
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

-- Intervenes in an origin and locks the head of a group: of its jobs that run one at a time (policy 2 is "parallel") the
-- first.
CREATE FUNCTION sidings.take_head(its_origin text, its_group text, OUT head sidings.job, OUT state text, OUT owner uuid,
                                  OUT epoch bigint, OUT running bigint[])
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET lock_timeout = '2s' AS $$
BEGIN
    SELECT i.owner, i.epoch, i.running INTO owner, epoch, running FROM sidings.intervene(its_origin) i;
    SELECT j.* INTO head FROM sidings.job j
    WHERE j.origin = its_origin AND j."group" = its_group AND j.position IS NOT NULL AND j.policy <> 2
    ORDER BY j.position LIMIT 1 FOR UPDATE;
    IF head.id IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004', MESSAGE = format('no job waits in the group %s of %s', its_group, its_origin),
            HINT = 'Check origin and group; its jobs may have run meanwhile.';
    END IF;
    SELECT v.state INTO state FROM sidings.job_overview v WHERE v.id = head.id;
END $$;

-- The head of a group that backs off or is blocked runs now. Returns its id.
CREATE FUNCTION sidings.release_group(origin text, "group" text, actor text, reason text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    t record;
BEGIN
    SELECT * INTO t FROM sidings.take_head(origin, "group");
    IF t.state NOT IN ('backing off', 'blocked') THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004',
            MESSAGE = format('the group %s of %s is not blocked: its head, job %s, is %s', "group", origin, (t.head).id, t.state),
            HINT = 'If it is paused, resume it.';
    END IF;
    PERFORM sidings.make_due(t.head);
    PERFORM sidings.note_action(actor, 'release group', jsonb_build_object('origin', origin, 'group', "group"), reason,
                                jsonb_build_object('found', t.state, 'head', (t.head).id));
    RETURN (t.head).id;
END $$;

-- The head of a group that backs off, is blocked or is paused ends as discarded; the next one follows. Never one that has
-- done no harm: while a person decides, the head may have succeeded.
--   head  the id that is expected there; another one is not skipped
-- Returns its id.
CREATE FUNCTION sidings.skip_head(origin text, "group" text, actor text, reason text DEFAULT NULL, head bigint DEFAULT NULL)
RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    t record;
BEGIN
    SELECT * INTO t FROM sidings.take_head(origin, "group");
    IF (t.head).id <> skip_head.head THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004',
            MESSAGE = format('the head of the group %s of %s is job %s now, not %s', "group", origin, (t.head).id, skip_head.head),
            HINT = 'Look at that job first.';
    END IF;
    IF t.state NOT IN ('backing off', 'blocked') AND NOT (t.state = 'waiting' AND EXISTS (
           SELECT FROM sidings.pause p
           WHERE p.kind = 'group' AND p.origin = skip_head.origin AND p."group" = skip_head."group")) THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004',
            MESSAGE = format('the group %s of %s is not blocked: its head, job %s, is %s', "group", origin, (t.head).id, t.state),
            HINT = 'Discard that job by its id if it is to go all the same.';
    END IF;
    PERFORM sidings.end_jobs(ARRAY[(t.head).id], 'discarded', actor, reason, t.owner, t.epoch, t.running);
    PERFORM sidings.note_action(actor, 'skip head', jsonb_build_object('origin', origin, 'group', "group",
                                                                       'job', (t.head).id, 'type', (t.head).type),
                                reason, jsonb_build_object('found', t.state));
    RETURN (t.head).id;
END $$;

-- The waiting and delayed jobs of a group end as cancelled; held ones stay.
--   running  also those that run
--   most     so many at once, the last ones first. The holder's cycles wait meanwhile, so a group of a million is cleared
--            in parts: call it again while it returns `most`. Until its head is gone, nothing behind that starts.
-- Where jobs have ended that it has waited for, as superseded ones, it takes others for them. Returns how many.
CREATE FUNCTION sidings.clear_group(origin text, "group" text, actor text, reason text DEFAULT NULL,
                                    running boolean DEFAULT false, most integer DEFAULT 10000) RETURNS bigint
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET lock_timeout = '2s' AS $$
DECLARE
    i       record;
    ids     bigint[];
    spared  bigint[] := '{}';
    chosen  integer;
    cleared bigint := 0;
BEGIN
    SELECT * INTO i FROM sidings.intervene(origin);
    IF NOT running THEN
        spared := ARRAY(SELECT j.id FROM sidings.job j
                        WHERE j.id = ANY (i.running) AND j.origin = clear_group.origin AND j."group" = clear_group."group");
    END IF;
    LOOP
        ids := ARRAY(SELECT j.id FROM sidings.job j
                     WHERE j.origin = clear_group.origin AND j."group" = clear_group."group" AND j.held IS NULL
                       AND j.id <> ALL (spared)
                     ORDER BY j.position DESC NULLS FIRST LIMIT most - cleared);
        chosen := cardinality(ids);
        -- Locked in the order in which promotion locks delayed jobs, or the two could wait for each other.
        ids := ARRAY(SELECT k.id FROM (SELECT j.id FROM sidings.job j WHERE j.id = ANY (ids) AND j.held IS NULL
                                       ORDER BY j.run_at, j.id FOR UPDATE) k);
        cleared := cleared + sidings.end_jobs(ids, 'cancelled', actor, reason, i.owner, i.epoch, i.running);
        EXIT WHEN cardinality(ids) = chosen;   -- else some have ended meanwhile, and fewer than `most` would say that none is left
    END LOOP;
    IF cleared > 0 THEN
        PERFORM sidings.note_action(actor, 'clear group', jsonb_build_object('origin', origin, 'group', "group"), reason,
                                    jsonb_build_object('cancelled', cleared, 'running', running));
    END IF;
    RETURN cleared;
END $$;

-- The target of a pause, and its locks. All executors have to learn of a type. The table lock is for those that are just
-- starting: a row made after an UPDATE of all rows would not be told. EXCLUSIVE, because a takeover that has locked a row
-- (ROW SHARE) is going to update it.
CREATE FUNCTION sidings.take_target(its_type text, its_origin text, its_group text) RETURNS text
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

-- No further job of a type, of an origin, or of a group of an origin starts; what runs goes on, what comes waits.
CREATE FUNCTION sidings.pause_jobs(actor text, reason text, type text DEFAULT NULL, origin text DEFAULT NULL,
                                   "group" text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    its_kind text;
    standing record;
BEGIN
    IF coalesce(reason, '') = '' THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'a pause needs a reason',
            HINT = 'Give reason => ''…'': whoever wonders why nothing runs will read it.';
    END IF;
    its_kind := sidings.take_target(type, origin, "group");
    SELECT p.* INTO standing FROM sidings.pause p
    WHERE p.kind = its_kind AND (p.type, p.origin, p."group")
          IS NOT DISTINCT FROM (pause_jobs.type, pause_jobs.origin, pause_jobs."group");
    IF FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004',
            MESSAGE = format('the %s %s is paused already, by %s since %s: %s', its_kind, concat_ws(' of ', "group", coalesce(type, origin)),
                             standing.paused_by, to_char(standing.paused_at, 'YYYY-MM-DD HH24:MI:SS OF'), standing.reason),
            HINT = 'Leave it, or resume it first.';
    END IF;
    PERFORM sidings.note_action(actor, 'pause', jsonb_strip_nulls(jsonb_build_object('type', type, 'origin', origin, 'group', "group")),
                                reason);
    INSERT INTO sidings.pause (kind, type, origin, "group", paused_by, reason)
    VALUES (its_kind, type, origin, "group", actor, reason);
END $$;

-- The end of a pause.
CREATE FUNCTION sidings.resume_jobs(actor text, reason text DEFAULT NULL, type text DEFAULT NULL, origin text DEFAULT NULL,
                                    "group" text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    its_kind text := sidings.take_target(type, origin, "group");
    ended    record;
BEGIN
    DELETE FROM sidings.pause p
    WHERE p.kind = its_kind AND (p.type, p.origin, p."group")
          IS NOT DISTINCT FROM (resume_jobs.type, resume_jobs.origin, resume_jobs."group")
    RETURNING p.* INTO ended;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004',
            MESSAGE = format('the %s %s is not paused', its_kind, concat_ws(' of ', "group", coalesce(type, origin))),
            HINT = 'Look at the list of pauses: its type or its origin may be.';
    END IF;
    PERFORM sidings.note_action(actor, 'resume', jsonb_strip_nulls(jsonb_build_object('type', type, 'origin', origin, 'group', "group")),
                                reason, jsonb_build_object('paused_by', ended.paused_by, 'paused_at', ended.paused_at,
                                                           'reason', ended.reason));
END $$;

-- All jobs of an origin that nobody holds go to another one, in the same order, behind what waits there: new positions and
-- a new txid, in one transaction. It takes what a takeover takes: the origin's row, then the former owner's, whose running
-- jobs are accounted for as lost. The target needs no lock: its reader finds rows above its mark, and late ones by their
-- txid.
--   lease  the longest lease of the executors: what Postgres says of an expired one is believed when it has been up so long
-- The next ticks of periodic jobs follow those that are moved, and wait for them there. Jobs that others enqueue meanwhile
-- stay. Returns how many were moved.
--
-- The target must have been held once, which its epoch tells. To have a row is not enough: whoever pauses an origin that is
-- misspelt, or cancels a job of it, makes one. Nor may it be a slot of the outbox: that is held by a relay, so jobs there
-- would never run, and would not count as orphans either. The audit tells the epoch that the origin has from then on: as
-- long as it has that, nobody has held it since.
CREATE FUNCTION sidings.move_jobs(origin text, "to" text, actor text, reason text DEFAULT NULL,
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
