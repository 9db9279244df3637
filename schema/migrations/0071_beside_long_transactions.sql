-- runs with 0051
--
-- What persons do, and the history's retention, get on beside transactions that take long.
--
-- What persons do goes over no former versions of executors' rows, as cycles and takeovers do not since 0062. Beside a long transaction,
-- as a dump, each look at a job's state read all versions of all executors, hundreds of thousands an hour for each of them: for an
-- action while it held locks for which cycles and renewals wait, three times for each origin. Each function is written out once more;
-- what has changed stands above it.

-- docs/job-states.md, in one word: of a job that an executor does or does not name, what the view says of it.
CREATE FUNCTION sidings.state_of(its_held text, named boolean, its_position bigint, its_run_at timestamptz) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE AS $$
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

-- As before, but the history is locked for what it gets alone. One statement that could write there had it locked until the caller's
-- transaction ended, also where it found no job, or the type has no history; and meanwhile no day is made or dropped.
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
    gone    sidings.job;
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
            DELETE FROM sidings.job j
            WHERE j.id = coalesce(withdraw.job_id, (SELECT k.id FROM sidings.job k
                                                    WHERE k.type = withdraw.type AND k.unique_key = withdraw.unique_key))
              AND j.type = withdraw.type AND num_nonnulls(j.position, j.held) = 0 AND j.attempt = 1
            RETURNING j.* INTO gone;
            IF NOT FOUND THEN
                RETURN false;
            ELSIF history THEN
                INSERT INTO sidings.job_history
                    (job_id, enqueued_at, due_at, finished_at, attempt, outcome, priority, type, origin, "group", error_class,
                     error_message, correlation_id, headers, payload)
                VALUES (gone.id, gone.enqueued_at, gone.run_at, clock_timestamp(), gone.attempt, 'cancelled', gone.priority, gone.type,
                        gone.origin, gone."group", 'Cancelled', 'withdrawn in a transaction of the application',
                        gone.headers ->> 'correlation_id', gone.headers,
                        coalesce(gone.payload, 'null'));   -- without any it is erased, and not requeued
            END IF;
            RETURN true;
    END CASE;
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = problem, HINT = remedy;
END $$;

-- As before, but the nearer the day, the longer transactions that write the history are waited for: a second more for each day less, up to
-- 2.3 s. Where withdrawals overlap, of transactions that take a second each, 0.3 s was never enough. Whoever comes meanwhile waits
-- behind, cycles, too, whose statements may take 3 s; so readers, which a backup is, are waited for no longer than before.
CREATE OR REPLACE FUNCTION sidings.make_history_day(its_day date) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '300ms' SET DateStyle = 'ISO' SET TimeZone = 'UTC' AS $$
DECLARE
    part  text := 'job_history_' || to_char(its_day, 'YYYYMMDD');
    first timestamptz := its_day::timestamp AT TIME ZONE 'UTC';
    next  timestamptz := (its_day + 1)::timestamp AT TIME ZONE 'UTC';
BEGIN
    PERFORM set_config('lock_timeout', least(300 + 1000 * greatest((now() AT TIME ZONE 'UTC')::date + 2 - its_day, 0), 2300) || 'ms', true);
    LOCK TABLE sidings.job_history IN SHARE ROW EXCLUSIVE MODE;
    PERFORM set_config('lock_timeout', '300ms', true);
    IF to_regclass('sidings.' || part) IS NOT NULL THEN
        RETURN;  -- another was quicker
    END IF;
    WITH days AS MATERIALIZED (
        SELECT substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \(''(.+)''\)$')::timestamptz AS until
        FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'sidings.job_history'::regclass
    )
    SELECT greatest(first, max(k.until)) INTO first FROM days k WHERE k.until < next;
    EXECUTE format('CREATE TABLE sidings.%I (LIKE sidings.job_history INCLUDING DEFAULTS)', part);
    EXECUTE format('WITH moved AS (DELETE FROM sidings.job_history_default WHERE finished_at >= %L AND '
                   'finished_at < %L RETURNING *) INSERT INTO sidings.%I SELECT * FROM moved', first, next, part);
    PERFORM sidings.share_history_day(to_regclass('sidings.' || part));
    EXECUTE format('ALTER TABLE sidings.job_history ATTACH PARTITION sidings.%I FOR VALUES FROM (%L) TO (%L)', part, first, next);
END $$;

-- As before, but the longer days are overdue, the longer their drop waits for who uses the history: a second more for each of them, up
-- to 2.5 s in all, as for ids of messages (0058). But not once a day was made: cycles have waited for that.
CREATE OR REPLACE FUNCTION sidings.maintain(keep_days integer) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' SET enable_bitmapscan = on AS $$  -- for the BRIN index
DECLARE
    today     date := (now() AT TIME ZONE 'UTC')::date;
    archiving boolean := coalesce((SELECT s.archive_history FROM sidings.service s), false);
    d         date;
    old       record;
    until     timestamptz;
    alone     boolean := false;  -- has the history for itself, which cycles wait for
    most_moved   constant bigint := 20000;
    most_deleted constant bigint := 200000;
    most_bytes   constant bigint := 1000000000;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('sidings.maintain', 0)) THEN
        RETURN;
    END IF;
    IF NOT archiving THEN
        DELETE FROM sidings.job_history_default WHERE ctid = ANY (ARRAY(
            SELECT h.ctid FROM sidings.job_history_default h
            WHERE h.finished_at < (today - keep_days)::timestamp AT TIME ZONE 'UTC' LIMIT most_deleted));
    END IF;
    DELETE FROM sidings.executor e
    WHERE e.started_at < now() - interval '1 day'
      AND NOT EXISTS (SELECT FROM sidings.origin o WHERE o.owner = e.id);
    FOR d IN SELECT today + n FROM generate_series(0, 2) n LOOP
        CONTINUE WHEN to_regclass('sidings.job_history_' || to_char(d, 'YYYYMMDD')) IS NOT NULL;
        IF pg_relation_size('sidings.job_history_default') > most_bytes OR (SELECT count(*) FROM (
               SELECT FROM sidings.job_history_default h
               WHERE h.finished_at >= d::timestamp AT TIME ZONE 'UTC' AND h.finished_at < (d + 1)::timestamp AT TIME ZONE 'UTC'
               LIMIT most_moved + 1) few) > most_moved
        THEN
            RAISE LOG 'sidings: the history of % stays in the default partition, which holds too much (docs/operations.md)', d;
            CONTINUE;
        END IF;
        BEGIN
            PERFORM sidings.make_history_day(d);
            alone := true;
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            IF d = today THEN
                RAISE;   -- tried again in a minute: meanwhile its rows gather in the default partition
            END IF;
            RAISE LOG 'sidings: the history of % gets its partition later, the tables are in use', d;
        END;
    END LOOP;
    until := clock_timestamp() + interval '2 seconds';
    FOR old IN
        SELECT c.relname, to_date(right(c.relname, 8), 'YYYYMMDD') AS day, least(100 + 1000 * count(*) FILTER (
                   WHERE to_date(right(c.relname, 8), 'YYYYMMDD') < today - keep_days - 1) OVER (), 2500) AS most_ms
        FROM pg_inherits i
        JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'sidings.job_history'::regclass AND c.relname ~ '^job_history_\d{8}$'
          AND to_date(right(c.relname, 8), 'YYYYMMDD') < today - keep_days
        ORDER BY random()   -- those that are in use for long keep no others from their turn
    LOOP
        EXIT WHEN clock_timestamp() > until;
        CONTINUE WHEN archiving AND NOT sidings.history_archived(old.day);
        -- A long query over the history must not keep tomorrow's partition from being made, nor make cycles
        -- queue up behind us: the day is dropped another time.
        BEGIN
            PERFORM set_config('lock_timeout', '100ms', true);
            EXECUTE format('LOCK TABLE sidings.%I IN ACCESS EXCLUSIVE MODE', old.relname);
            CONTINUE WHEN archiving AND NOT sidings.history_archived(old.day);  -- a writer that we have waited for
            PERFORM set_config('lock_timeout', CASE WHEN alone THEN '100ms' ELSE old.most_ms || 'ms' END, true);
            EXECUTE format('DROP TABLE sidings.%I', old.relname);
            alone := true;
            UPDATE sidings.history_archive a SET dropped_at = now() WHERE a.day = old.day AND a.dropped_at IS NULL;
            DELETE FROM sidings.history_late l WHERE l.day = old.day;
        EXCEPTION WHEN OTHERS THEN   -- in use, or something depends on it
            RAISE LOG 'sidings: % will be dropped later: %', old.relname, SQLERRM;
        END;
    END LOOP;
END $$;

-- As before, but all origins are locked by name, and then all holders by id, as by others who lock several: in the order of the origins
-- it and they waited for each other, until the server ended one of them. So holders of the last partitions wait, too, for as long as
-- those of the first ones did.
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
        ), places AS (
            SELECT its_topic || '/' || v.partition AS origin, v.partition, v.next, v.until FROM moved v
            UNION
            SELECT e.origin, e.partition, e.next, e.until FROM elsewhere e
        )
        SELECT p.*, CASE WHEN row_number() OVER (ORDER BY p.origin, p.partition) = 1 THEN array_agg(p.origin) OVER () END AS origins
        FROM places p ORDER BY p.origin, p.partition
    LOOP
        IF o.origins IS NOT NULL THEN   -- the first one
            PERFORM sidings.stay_origin(n.origin) FROM (SELECT DISTINCT u.origin FROM unnest(o.origins) u (origin) ORDER BY 1) n;
            PERFORM set_config('lock_timeout', '2s', true);   -- as intervene_for_long() does: the cycles of those locked already wait
            PERFORM sidings.lock_executor(h.owner)
            FROM (SELECT DISTINCT x.owner FROM sidings.origin x
                  WHERE x.origin = ANY (o.origins) AND x.owner IS NOT NULL ORDER BY x.owner) h;
            PERFORM set_config('lock_timeout', '5s', true);
        END IF;
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
