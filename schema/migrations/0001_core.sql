-- The core: ownership, jobs, their history, consumer offsets.
--
-- "sidings." stands for the schema's name; migrate() puts in the one that the service has chosen.

-- A schema belongs to one service: two services in one schema would run each other's jobs.
CREATE TABLE sidings.service (
    name       text NOT NULL,
    only_row   boolean NOT NULL DEFAULT true,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT service_pkey PRIMARY KEY (only_row),
    CONSTRAINT service_only_row CHECK (only_row)
);

-- One row per process start (a random id, never a pod's name: two processes under one name would take each
-- other's leases for their own). `running` names every job that the executor runs or is about to run;
-- `cycle` and `fence` are what the compare-and-set of the cycle statement tests.
CREATE TABLE sidings.executor (
    id         uuid NOT NULL,
    cycle      bigint NOT NULL DEFAULT 0,
    fence      bigint NOT NULL DEFAULT 0,
    started_at timestamptz NOT NULL DEFAULT now(),
    host       text NOT NULL DEFAULT '',
    pid        integer NOT NULL DEFAULT 0,
    running    bigint[] NOT NULL DEFAULT '{}',
    CONSTRAINT executor_pkey PRIMARY KEY (id)
) WITH (
    fillfactor = 30,                       -- rewritten every few milliseconds: room for HOT updates on its page
    autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_scale_factor = 0
);
-- Stay in the row: a TOAST write per cycle costs more than the bytes.
ALTER TABLE sidings.executor ALTER COLUMN running SET STORAGE MAIN;

CREATE TABLE sidings.origin (
    origin            text NOT NULL,
    epoch             bigint NOT NULL DEFAULT 0,
    lease_until       timestamptz,
    wanted_until      timestamptz,
    wanted_generation bigint,
    owner             uuid,
    wanted_by         uuid,
    CONSTRAINT origin_pkey PRIMARY KEY (origin),
    -- A part of the fence: it makes every change of the epoch a *key* update, which conflicts with FOR KEY
    -- SHARE. Without it FOR KEY SHARE returns a stale row without waiting.
    CONSTRAINT origin_epoch_is_a_key UNIQUE (origin, epoch)
) WITH (
    fillfactor = 50,                       -- renewals are HOT updates: lease_until stands in no index
    autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_scale_factor = 0
);
CREATE INDEX origin_owner ON sidings.origin (owner) WHERE owner IS NOT NULL;

-- CACHE 1 is part of the protocol: with a larger cache a session hands out old numbers later.
CREATE SEQUENCE sidings.job_position CACHE 1;

-- States of a row (docs/job-states.md):
--   waiting   position set (a grouped job that backs off keeps its position; run_at says until when)
--   delayed   position null, run_at set: its owner gives it a position when it is due
--   held      position null, held says why
-- Everything that changes a waiting row behind the readers' mark gives it a new position *and* txid.
CREATE TABLE sidings.job (
    id               bigint GENERATED ALWAYS AS IDENTITY,
    -- The transaction id is taken before the position (CASE evaluates its condition first), so that a
    -- position above a reader's mark belongs to an id that the reader's snapshot could already name.
    position         bigint DEFAULT
        CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('sidings.job_position') END,
    txid             xid8 NOT NULL DEFAULT pg_current_xact_id(),
    run_at           timestamptz,
    enqueued_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    first_started_at timestamptz,
    attempt          integer NOT NULL DEFAULT 1,
    failures         integer NOT NULL DEFAULT 0,
    losses           smallint NOT NULL DEFAULT 0,
    priority         smallint NOT NULL DEFAULT 0,
    policy           smallint NOT NULL DEFAULT 0,
    type             text NOT NULL,
    origin           text NOT NULL,
    "group"          text,
    unique_key       text,
    held             text,
    headers          jsonb,                -- refuses \u0000, so that ->> in cycle and acquire can never fail
    payload          json,                 -- json, not jsonb: kept to the letter, cheaper to store, any \u0000 allowed
    CONSTRAINT job_pkey PRIMARY KEY (id),
    CONSTRAINT job_state CHECK ((position IS NOT NULL AND held IS NULL)
                                OR (position IS NULL AND (run_at IS NOT NULL OR held IS NOT NULL)))
) WITH (
    autovacuum_vacuum_scale_factor = 0,    -- by count: a queue's size says nothing about its churn
    autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_insert_scale_factor = 0,
    autovacuum_vacuum_insert_threshold = 200000,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 50000,
    autovacuum_vacuum_cost_delay = 0
);
-- The reader's forward and late parts.
CREATE INDEX job_scan ON sidings.job (origin, position) WHERE position IS NOT NULL;
-- Refills of one group; "is a message of this key parked".
CREATE INDEX job_group ON sidings.job (origin, "group", position) WHERE "group" IS NOT NULL;
-- Promotion of delayed jobs in due order.
CREATE INDEX job_due ON sidings.job (origin, run_at) WHERE position IS NULL AND held IS NULL;
CREATE INDEX job_held ON sidings.job (origin) WHERE held IS NOT NULL;

CREATE TYPE sidings.outcome AS ENUM
    ('succeeded', 'retried', 'snoozed', 'discarded', 'cancelled', 'superseded', 'lost', 'held');

-- One row per attempt. No primary key: a cycle inserts hundreds of rows at once, and the partitioning column
-- would have to be part of it.
CREATE TABLE sidings.job_history (
    job_id            bigint NOT NULL,
    epoch             bigint,
    enqueued_at       timestamptz NOT NULL,
    due_at            timestamptz,
    started_at        timestamptz,
    finished_at       timestamptz NOT NULL,
    executor          uuid,
    attempt           integer NOT NULL,
    outcome           sidings.outcome NOT NULL,
    priority          smallint NOT NULL,
    type              text NOT NULL,
    origin            text NOT NULL,
    "group"           text,
    error_class       text,
    error_message     text,
    error_fingerprint text,
    correlation_id    text,
    payload           json
) PARTITION BY RANGE (finished_at);
-- BRIN: rows arrive nearly in the order of job_id, and an insert costs next to nothing.
CREATE INDEX job_history_job ON sidings.job_history USING brin (job_id) WITH (pages_per_range = 32, autosummarize = on);
CREATE INDEX job_history_finished ON sidings.job_history USING brin (finished_at) WITH (pages_per_range = 32, autosummarize = on);
-- A missing day must never stall the cycle.
CREATE TABLE sidings.job_history_default PARTITION OF sidings.job_history DEFAULT;

-- The next offset to read. Moved by a conditional UPDATE inside the handler's transaction; rows are created
-- at assignment, because an upsert would accept any expectation.
CREATE TABLE sidings.consumer_offset (
    next_offset bigint NOT NULL,
    partition   integer NOT NULL,
    topic       text NOT NULL,
    CONSTRAINT consumer_offset_pkey PRIMARY KEY (topic, partition)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0);

-- ACQUIRE and TAKEOVER, called in autocommit. plpgsql, because every statement of it gets a fresh snapshot:
-- what is read after a lock wait is what the former owner last committed. Lock order: origin (by name), then
-- executor. An origin that the caller itself owns is treated as free: it asks only for origins that it does
-- not hold in memory, so its lease ran out unnoticed by others; nothing was lost.
--   trust_expiry   false for one lease after the server's identity changed: expiry times may be old
CREATE FUNCTION sidings.acquire(me uuid, wanted text[], generation bigint, lease interval, trust_expiry boolean)
RETURNS TABLE (acquired text, acquired_epoch bigint, losses bigint, former uuid)
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    o   record;
    ids bigint[];
BEGIN
    INSERT INTO sidings.origin (origin)
    SELECT w FROM unnest(wanted) w
    WHERE NOT EXISTS (SELECT FROM sidings.origin x WHERE x.origin = w)
    ORDER BY w
    ON CONFLICT DO NOTHING;

    FOR o IN SELECT * FROM sidings.origin x WHERE x.origin = ANY (wanted) ORDER BY x.origin FOR UPDATE SKIP LOCKED
    LOOP
        IF o.owner IS NULL OR o.owner = me
           OR (trust_expiry AND o.lease_until < clock_timestamp()
               AND pg_postmaster_start_time() + lease < clock_timestamp())
        THEN
            ids := '{}';
            IF o.owner IS NOT NULL AND o.owner <> me THEN
                PERFORM 1 FROM sidings.executor e WHERE e.id = o.owner FOR UPDATE;   -- waits for its cycle in flight
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
            SET owner = me, epoch = x.epoch + 1, lease_until = clock_timestamp() + lease,
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

-- The end of a transactional handler: fence, then delete, the last thing before COMMIT (fencing first would block renewals for
-- as long as the handler runs). KEY SHARE conflicts with a takeover, not with a renewal; the caller sets a short
-- idle_in_transaction_session_timeout with it, so that a pause before its COMMIT ends in a rollback.
-- SD001: the origin has another owner or epoch. SD002: this attempt is over already.
CREATE FUNCTION sidings.finish(me uuid, its_origin text, its_epoch bigint, its_id bigint, its_attempt integer,
                               started_ago float8, keep_history boolean) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    ended sidings.job;
BEGIN
    PERFORM 1 FROM sidings.origin o
    WHERE o.origin = its_origin AND o.owner = me AND o.epoch = its_epoch
    FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'epoch % of origin % is superseded', its_epoch, its_origin USING ERRCODE = 'SD001';
    END IF;
    DELETE FROM sidings.job j WHERE j.id = its_id AND j.attempt = its_attempt RETURNING j.* INTO ended;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'attempt % of job % is over already', its_attempt, its_id USING ERRCODE = 'SD002';
    END IF;
    IF keep_history THEN
        INSERT INTO sidings.job_history (job_id, epoch, enqueued_at, due_at, started_at, finished_at, executor, attempt,
                                         outcome, priority, type, origin, "group", correlation_id)
        VALUES (ended.id, its_epoch, ended.enqueued_at, ended.run_at,
                clock_timestamp() - started_ago * interval '1 second', clock_timestamp(), me, ended.attempt, 'succeeded',
                ended.priority, ended.type, ended.origin, ended."group", ended.headers ->> 'correlation_id');
    END IF;
END $$;

-- Partitions of the history: made two days ahead, dropped `keep_days` after their day; rows of executors that
-- are long gone are removed. Called by every executor now and then; one at a time does the work.
CREATE FUNCTION sidings.maintain(keep_days integer) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    today date := (now() AT TIME ZONE 'UTC')::date;
    d     date;
    part  text;
    old   record;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('sidings.maintain', 0)) THEN
        RETURN;
    END IF;
    FOR d IN SELECT today + n FROM generate_series(0, 2) n LOOP
        part := 'job_history_' || to_char(d, 'YYYYMMDD');
        CONTINUE WHEN to_regclass('sidings.' || part) IS NOT NULL;
        -- Cycles wait for the few milliseconds that this takes. Else rows come into the default partition between
        -- the move and ATTACH, which then fails, again and again under load; and a lock on the default alone makes
        -- the cycles fail that were about to insert there.
        LOCK TABLE sidings.job_history IN SHARE ROW EXCLUSIVE MODE;
        EXECUTE format('CREATE TABLE sidings.%I (LIKE sidings.job_history INCLUDING DEFAULTS)', part);
        EXECUTE format('WITH moved AS (DELETE FROM sidings.job_history_default WHERE finished_at >= %L AND '
                       'finished_at < %L RETURNING *) INSERT INTO sidings.%I SELECT * FROM moved',
                       d::timestamp AT TIME ZONE 'UTC', (d + 1)::timestamp AT TIME ZONE 'UTC', part);
        EXECUTE format('ALTER TABLE sidings.job_history ATTACH PARTITION sidings.%I FOR VALUES FROM (%L) TO (%L)',
                       part, d::timestamp AT TIME ZONE 'UTC', (d + 1)::timestamp AT TIME ZONE 'UTC');
    END LOOP;
    FOR old IN
        SELECT c.relname FROM pg_inherits i
        JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'sidings.job_history'::regclass AND c.relname ~ '^job_history_\d{8}$'
          AND to_date(right(c.relname, 8), 'YYYYMMDD') < today - keep_days
    LOOP
        -- A long query over the history must not keep tomorrow's partition from being made, nor make cycles
        -- queue up behind us: the day is dropped another time.
        BEGIN
            PERFORM set_config('lock_timeout', '100ms', true);
            EXECUTE format('DROP TABLE sidings.%I', old.relname);
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            RAISE LOG 'sidings: % is in use and will be dropped later', old.relname;
        END;
    END LOOP;
    DELETE FROM sidings.job_history_default WHERE finished_at < (today - keep_days)::timestamp AT TIME ZONE 'UTC';
    DELETE FROM sidings.executor e
    WHERE e.started_at < now() - interval '1 day'
      AND NOT EXISTS (SELECT FROM sidings.origin o WHERE o.owner = e.id);
END $$;

-- The first days, so that no row begins its life in the default partition.
SELECT sidings.maintain(30);
