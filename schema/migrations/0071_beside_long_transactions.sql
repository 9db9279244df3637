-- runs with 0051
--
-- What persons do goes over no former versions of executors' rows, as cycles and takeovers do not since 0062. Beside a long transaction,
-- as a dump, each look at a job's state read all versions of all executors, hundreds of thousands an hour for each of them: for an
-- action while it held locks for which cycles and renewals wait, three times for each origin. Each function is written out once more;
-- what has changed stands above it.

-- docs/job-states.md, in one word: of a job that an executor does or does not name, what the view says of it.
CREATE FUNCTION sidings.state_of(its_held text, named boolean, its_position bigint, its_run_at timestamptz) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN its_held IS NOT NULL THEN 'held'
                WHEN named THEN 'running'
                WHEN its_position IS NULL THEN 'delayed'
                WHEN its_run_at = 'infinity' THEN 'blocked'
                WHEN its_run_at > statement_timestamp() THEN 'backing off'
                ELSE 'waiting' END
$$;
GRANT EXECUTE ON FUNCTION sidings.state_of(text, boolean, bigint, timestamptz) TO PUBLIC;   -- who may read the view needs no more

-- As before, but only holders of origins are asked what they name, each by its newest version: a release follows a cycle that names
-- nothing there, and who takes over takes out of the former owner's row what that named.
CREATE OR REPLACE VIEW sidings.job_overview AS
SELECT j.id, j.type, j.origin, j."group",
       sidings.state_of(j.held,
                        j.id IN (SELECT unnest(n.running)
                                 FROM (SELECT DISTINCT o.owner FROM sidings.origin o WHERE o.owner IS NOT NULL) h,
                                      LATERAL (SELECT x.running FROM sidings.executor x
                                               WHERE uuid_send(x.id) = uuid_send(h.owner) ORDER BY x.era DESC LIMIT 1) n),
                        j.position, j.run_at) AS state,
       j.priority, j.attempt, j.failures, j.losses, j.enqueued_at, j.first_started_at, j.run_at, j.position, j.policy,
       j.unique_key, j.held, j.error, j.headers, j.payload
FROM sidings.job j;

-- As before, but its state is told by what the holder names, whose row is locked.
CREATE OR REPLACE FUNCTION sidings.take_job(job bigint, OUT taken sidings.job, OUT state text, OUT owner uuid, OUT epoch bigint,
                                 OUT running bigint[])
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off SET lock_timeout = '2s' AS $$
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
    state := sidings.state_of(taken.held, job = ANY (running), taken.position, taken.run_at);
END $$;

-- As before, likewise.
CREATE OR REPLACE FUNCTION sidings.take_head(its_origin text, its_group text, OUT head sidings.job, OUT state text, OUT owner uuid,
                                  OUT epoch bigint, OUT running bigint[])
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET lock_timeout = '2s' AS $$
BEGIN
    SELECT i.owner, i.epoch, i.running INTO owner, epoch, running FROM sidings.intervene(its_origin) i;
    SELECT j.* INTO head FROM sidings.job j
    WHERE j.origin = its_origin AND j."group" = its_group AND j.position IS NOT NULL AND j.policy <> 2
    ORDER BY j.position LIMIT 1 FOR UPDATE;
    IF head.id IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004', MESSAGE = format('no job waits in the group %s of %s', its_group, its_origin),
            HINT = 'Check origin and group; its jobs may have run meanwhile.';
    END IF;
    state := sidings.state_of(head.held, head.id = ANY (running), head.position, head.run_at);
END $$;

-- As before, likewise; and holders are locked by their newest versions.
CREATE OR REPLACE FUNCTION sidings.act_on_jobs(act text, jobs bigint[], actor text, reason text DEFAULT NULL, still text DEFAULT NULL)
RETURNS TABLE (job bigint, state text, code text, refusal text)
LANGUAGE plpgsql SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET lock_timeout = '2s' AS $$
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
    PERFORM sidings.lock_executor(h.owner)
    FROM (SELECT DISTINCT o.owner FROM sidings.origin o WHERE o.origin = ANY (origins) AND o.owner IS NOT NULL ORDER BY o.owner) h;
    FOR here, theirs IN
        SELECT j.origin, array_agg(j.id ORDER BY array_position(jobs, j.id)) FROM sidings.job j
        WHERE j.id = ANY (jobs) AND j.origin = ANY (origins) GROUP BY j.origin ORDER BY j.origin
    LOOP
        SELECT * INTO i FROM sidings.intervene(here);
        taken := ARRAY(SELECT j.id FROM sidings.job j WHERE j.id = ANY (theirs) AND j.origin = here FOR UPDATE SKIP LOCKED);
        fitting := ARRAY(SELECT j.id FROM sidings.job j, sidings.state_of(j.held, j.id = ANY (i.running), j.position, j.run_at) AS s (state)
                         WHERE j.id = ANY (taken) AND (still IS NULL OR s.state = still) AND CASE act
                         WHEN 'retry now' THEN s.state IN ('delayed', 'backing off', 'blocked')
                         WHEN 'release' THEN s.state = 'held' ELSE true END);
        RETURN QUERY
            SELECT j.id, s.state, CASE WHEN j.id <> ALL (fitting) THEN 'SD004' END, CASE WHEN j.id <> ALL (fitting) THEN
                   format('job %s is %s%s', j.id, s.state, CASE
                          WHEN s.state <> still THEN format(' now, not %s', still)
                          WHEN act = 'release' THEN ', not held: Only held jobs are released; one that backs off can be retried now.'
                          WHEN s.state = 'held' THEN ': Release it instead.'
                          WHEN s.state = 'running' THEN ': Wait for its outcome, or cancel it.'
                          ELSE ': It runs when its turn comes.' END) END
            FROM sidings.job j, sidings.state_of(j.held, j.id = ANY (i.running), j.position, j.run_at) AS s (state)
            WHERE j.id = ANY (taken);
        answered := answered || taken;
        PERFORM sidings.note_action(actor, act, jsonb_build_object('job', j.id, 'type', j.type, 'origin', j.origin, 'group', j."group"),
                                    reason, CASE act WHEN 'release' THEN jsonb_build_object('held', j.held)
                                                     ELSE jsonb_build_object('found', s.state) END)
        FROM sidings.job j, sidings.state_of(j.held, j.id = ANY (i.running), j.position, j.run_at) AS s (state)
        WHERE j.id = ANY (fitting) ORDER BY array_position(theirs, j.id);
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

-- As before, but each executor's row is found by its newest version, from one id to the next below it: those that hold nothing, too, for
-- whoever has just acquired an origin may have read it without the pause. Nothing changes them meanwhile.
CREATE OR REPLACE FUNCTION sidings.take_target(its_type text, its_origin text, its_group text) RETURNS text
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off SET lock_timeout = '2s' AS $$
BEGIN
    IF its_type <> '' AND num_nonnulls(its_origin, its_group) = 0 THEN
        PERFORM sidings.begin_action();
        LOCK TABLE sidings.executor IN EXCLUSIVE MODE;
        WITH RECURSIVE newest (id, place) AS (
            (SELECT uuid_send(e.id), e.ctid FROM sidings.executor e ORDER BY uuid_send(e.id) DESC, e.era DESC LIMIT 1)
            UNION ALL
            SELECT below.* FROM newest n, LATERAL (SELECT uuid_send(e.id), e.ctid FROM sidings.executor e WHERE uuid_send(e.id) < n.id
                                                   ORDER BY uuid_send(e.id) DESC, e.era DESC LIMIT 1) below
        )
        UPDATE sidings.executor e SET fence = e.fence + 1 WHERE e.ctid = ANY (ARRAY(SELECT n.place FROM newest n));
        PERFORM sidings.announce('');
        RETURN 'type';
    ELSIF its_type IS NULL AND its_origin <> '' AND its_group IS DISTINCT FROM '' THEN
        PERFORM sidings.intervene(its_origin);
        RETURN CASE WHEN its_group IS NULL THEN 'origin' ELSE 'group' END;
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'it is not clear what is meant',
        HINT = 'Give a type, or an origin, or an origin and a group.';
END $$;

-- As before, but whose an origin is its name tells: only slots of the outbox are leased by others than executors. Plan: origin_pkey.
CREATE OR REPLACE FUNCTION sidings.running_origin(origins text[]) RETURNS text
LANGUAGE sql VOLATILE SET enable_seqscan = off SET jit = off AS $$
    SELECT o.origin FROM sidings.origin o
    WHERE o.origin = ANY (origins) AND o.lease_until > clock_timestamp() AND o.origin !~ '^outbox/([0-9]|1[0-5])$'
      AND NOT EXISTS (SELECT FROM sidings.pause p WHERE p.kind = 'origin' AND p.origin = o.origin)
    ORDER BY array_position(origins, o.origin) LIMIT 1
$$;
