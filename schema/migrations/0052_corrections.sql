-- runs with 0051
--
-- Corrections of functions of before. Each is written out once more; what has changed stands above it.

-- As before, but the rows of all former owners are locked by id, before the first of them is changed: two executors that
-- take over from the same two, whose origins alternate, waited for each other until the server ended one of them. Which
-- leases have run out is decided once, for these rows.
CREATE OR REPLACE FUNCTION sidings.acquire(me uuid, wanted text[], generation bigint, lease interval, trust_expiry boolean)
RETURNS TABLE (acquired text, acquired_epoch bigint, losses bigint, former uuid)
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    o     record;
    ids   bigint[];
    first bigint;  -- epoch of this timeline
    ours  text[];
    at    timestamptz;
BEGIN
    INSERT INTO sidings.origin (origin)
    SELECT w FROM unnest(wanted) w
    WHERE NOT EXISTS (SELECT FROM sidings.origin x WHERE x.origin = w)
    ORDER BY w
    ON CONFLICT DO NOTHING;

    first := (('x' || sidings.timeline())::bit(32)::bigint - 1) * 1000000000;
    ours := ARRAY(SELECT x.origin FROM sidings.origin x WHERE x.origin = ANY (wanted) ORDER BY x.origin FOR UPDATE SKIP LOCKED);
    at := clock_timestamp();
    trust_expiry := trust_expiry AND pg_postmaster_start_time() + lease < at;
    PERFORM FROM sidings.executor e
    WHERE trust_expiry AND e.id IN (SELECT x.owner FROM sidings.origin x
                                    WHERE x.origin = ANY (ours) AND x.owner <> me AND x.lease_until < at)
    ORDER BY e.id FOR UPDATE;   -- waits for their cycles in flight
    FOR o IN SELECT * FROM sidings.origin x WHERE x.origin = ANY (ours) ORDER BY x.origin
    LOOP
        IF o.owner IS NULL OR o.owner = me OR (trust_expiry AND o.lease_until < at) THEN
            ids := '{}';
            IF o.owner IS NOT NULL AND o.owner <> me THEN
                WITH cut AS (
                    UPDATE sidings.job j
                    SET losses = LEAST(j.losses + 1, 32767), attempt = j.attempt + 1
                    FROM sidings.executor e, unnest(e.running) r (id)
                    WHERE e.id = o.owner AND j.id = r.id AND j.origin = o.origin
                    RETURNING j.*
                ), recorded AS (
                    INSERT INTO sidings.job_history (job_id, epoch, enqueued_at, due_at, finished_at, executor, attempt,
                                                     outcome, priority, type, origin, "group", correlation_id)
                    SELECT c.id, o.epoch, c.enqueued_at, c.run_at, clock_timestamp(), o.owner, c.attempt - 1,
                           'lost', c.priority, c.type, c.origin, c."group", c.headers ->> 'correlation_id'
                    FROM cut c
                )
                SELECT coalesce(array_agg(c.id), '{}') INTO ids FROM cut c;
                UPDATE sidings.executor e
                SET fence = e.fence + 1, running = ARRAY(SELECT r FROM unnest(e.running) r WHERE r <> ALL (ids))
                WHERE e.id = o.owner;
            END IF;
            UPDATE sidings.origin x
            SET owner = me, epoch = GREATEST(x.epoch + 1, first), lease_until = clock_timestamp() + lease,
                wanted_by = NULL, wanted_until = NULL, wanted_generation = NULL
            WHERE x.origin = o.origin
            RETURNING x.epoch INTO acquired_epoch;
            acquired := o.origin;
            losses := cardinality(ids);
            former := o.owner;
            RETURN NEXT;
        ELSIF o.wanted_until IS NULL OR o.wanted_until < clock_timestamp() OR o.wanted_generation <= generation THEN
            UPDATE sidings.origin x
            SET wanted_by = me, wanted_generation = generation, wanted_until = clock_timestamp() + lease
            WHERE x.origin = o.origin;
        END IF;
    END LOOP;
END $$;

-- As before, but the rows of all holders are locked by id, for the same reason.
CREATE OR REPLACE FUNCTION sidings.act_on_jobs(act text, jobs bigint[], actor text, reason text DEFAULT NULL)
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

-- As before, but it believes what it finds only where the timeline has been known for a lease, as those do who acquire: a
-- server that has just been promoted may lack an acquisition, or renewals, under which jobs of the origin run now.
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
    IF NOT EXISTS (SELECT FROM sidings.service s
                   WHERE s.timeline = sidings.timeline() AND s.timeline_since + lease < clock_timestamp()) THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004',
            MESSAGE = format('%s may be held under a lease of the server that this one has replaced: no executor has known this one for %s',
                             origin, lease),
            HINT = 'Have an instance of the service running for that long, and try again.';
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

-- As before, but a header whose value is a list is refused: a lax path looks into lists, and took ["x"] for a text.
CREATE OR REPLACE FUNCTION sidings.enqueue(
    type       text,
    payload    json,
    origin     text,
    "group"    text DEFAULT NULL,
    delay      interval DEFAULT NULL,
    run_at     timestamptz DEFAULT NULL,
    priority   integer DEFAULT 0,
    headers    jsonb DEFAULT NULL,
    unique_key text DEFAULT NULL,
    policy     text DEFAULT 'serial'
) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    problem text;
    remedy  text;
    due     timestamptz;
    number  integer := array_position('{serial,latest,parallel}'::text[], policy) - 1;
    new_id  bigint;
BEGIN
    origin := sidings.place(origin, "group");
    CASE
        WHEN type IS NULL OR type = '' THEN
            problem := 'the job has no type';
            remedy := 'Give the name of its handler, e.g. ''send_eta''.';
        WHEN origin IS NULL OR origin = '' THEN
            problem := format('the job %L needs an origin', type);
            remedy := 'Give origin => ''topic/partition'', the Kafka partition of the entity''s key.';
        WHEN "group" = '' THEN
            problem := format('the group of the job %L is empty', type);
            remedy := 'Give the key of its entity, or NULL for a job that stands alone.';
        WHEN strpos(concat(type, origin, "group", unique_key), chr(31)) > 0 THEN
            problem := format('type, origin, group or unique_key of the job %L holds a control character that cannot be stored (U+001F)', type);
            remedy := 'Remove it.';
        WHEN octet_length(type) > 1000 OR octet_length(origin) > 1000 OR octet_length("group") > 1000
             OR octet_length(unique_key) > 1000 THEN
            problem := format('type, origin, group or unique_key of the job %L is longer than 1000 bytes', left(type, 40));
            remedy := 'Use a shorter name, e.g. a hash of it: an index entry has to fit.';
        WHEN delay IS NOT NULL AND run_at IS NOT NULL THEN
            problem := format('the job %L has both delay and run_at', type);
            remedy := 'Give one of them.';
        WHEN delay < interval '0' OR delay > interval '366 days' THEN
            problem := format('the delay of the job %L is %s', type, delay);
            remedy := 'Give between 0 and 366 days, or use run_at.';
        WHEN run_at NOT BETWEEN '0001-01-01 00:00:00+00' AND '9999-12-31 23:59:59.999999+00' THEN
            problem := format('run_at: the job %L would become due at %s', type, run_at);
            remedy := 'Give a time from the year 1 to the year 9999 (in UTC): Python has no others.';
        WHEN priority IS NULL OR priority NOT BETWEEN -100 AND 100 THEN
            problem := format('the priority of the job %L is %s', type, coalesce(priority::text, 'NULL'));
            remedy := 'Give a whole number from -100 to 100.';
        WHEN jsonb_typeof(headers) <> 'object' OR jsonb_path_exists(headers, 'strict $.* ? (@.type() != "string")', silent => true) THEN
            problem := format('the headers of the job %L are not an object of texts', type);
            remedy := 'Give e.g. jsonb_build_object(''correlation_id'', …).';
        WHEN number IS NULL THEN
            problem := format('the policy of the job %L is %L', type, policy);
            remedy := 'Give ''serial'', ''latest'' or ''parallel'', as its type is declared.';
        WHEN number = 1 AND "group" IS NULL THEN
            problem := format('the job %L has the policy ''latest'' and no group', type);
            remedy := 'Give the key of its entity: the newest job of a group runs.';
        WHEN unique_key = '' THEN
            problem := format('the unique_key of the job %L is empty', type);
            remedy := 'Give what must not be there twice, or NULL.';
        WHEN unique_key IS NOT NULL THEN
            due := coalesce(run_at, clock_timestamp() + nullif(delay, interval '0'));
            SELECT u.id INTO new_id
            FROM sidings.insert_unique(type, origin, "group", priority, due, headers, payload, number, unique_key) u;
            RETURN new_id;
        ELSE
            due := coalesce(run_at, clock_timestamp() + nullif(delay, interval '0'));
            INSERT INTO sidings.job (type, origin, "group", priority, run_at, headers, payload, policy, position)
            VALUES (enqueue.type, enqueue.origin, enqueue."group", enqueue.priority, due, enqueue.headers, enqueue.payload, number,
                    CASE WHEN due IS NULL AND pg_current_xact_id() IS NOT NULL THEN nextval('sidings.job_position') END)
            RETURNING job.id INTO new_id;
            RETURN new_id;
    END CASE;
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = problem, HINT = remedy;
END $$;

-- An empty table is cheap to read through, and such a plan is kept in the session: then, in a burst, each key that is taken
-- cost a walk through all jobs.
ALTER FUNCTION sidings.insert_unique(text, text, text, integer, timestamptz, jsonb, json, integer, text) SET enable_seqscan = off;
