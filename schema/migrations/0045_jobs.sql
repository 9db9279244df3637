-- The core: ownership, jobs, cycles, periodic jobs.
--
-- "sidings." stands for the schema's name; migrate() puts in the one that the service has chosen.
-- Of the 51 numbers that were used before the first release these files have the last seven
-- (docs/decisions/0029-first-schema.md).

-- The timeline that this server writes: the promotion of a standby begins a new one. Ids, attempts and cycle numbers of
-- commits that were lost with the former primary are handed out again there, so what was read on one timeline says
-- nothing on another. Fails on a standby.
CREATE FUNCTION sidings.timeline() RETURNS text
LANGUAGE sql VOLATILE AS $$ SELECT left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) $$;

-- A schema belongs to one service: two services in one schema would run each other's jobs.
CREATE TABLE sidings.service (
    name            text NOT NULL,
    only_row        boolean NOT NULL DEFAULT true,
    created_at      timestamptz NOT NULL DEFAULT now(),
    -- Whether retention drops only what has been archived. A fact about the data, not about a process: one instance that was
    -- started without such a setting would drop days for all.
    archive_history boolean NOT NULL DEFAULT false,
    -- The timeline that this database is known to be on, and since when. A failover may have lost acquisitions: what is free
    -- on the new server may be another's, who runs jobs under a lease of the former one. So it is asked for only where the
    -- timeline has been known for a lease, also by an executor that starts just after the promotion. Who acquires notes
    -- another one that it finds (executor/acquire_origins.sql). A new schema has had no executor: -infinity.
    timeline        text NOT NULL DEFAULT sidings.timeline(),
    timeline_since  timestamptz NOT NULL DEFAULT '-infinity',
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
    autovacuum_vacuum_scale_factor = 0,
    toast.autovacuum_vacuum_threshold = 500,
    toast.autovacuum_vacuum_scale_factor = 0
);
-- From 250 ids on PostgreSQL would compress `running` in each cycle, for more than all else that begin_cycle() does: 0.4 ms
-- for 900 ids. Out of line and as they are, they cost less than the bytes in the row do.
ALTER TABLE sidings.executor ALTER COLUMN running SET STORAGE EXTERNAL;

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

-- The row of an executor that holds origins is not deleted. It names what runs there: without it nobody could tell which
-- attempts were lost with it, and the jobs ran again under the numbers of attempts that had begun already. Costs the cycles
-- nothing.
CREATE FUNCTION sidings.keep_executor() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM sidings.origin o WHERE o.owner = OLD.id) THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004', MESSAGE = format('the executor %s holds origins: its row says what runs there', OLD.id),
            HINT = 'End its process; the origins of a dead one are taken over, and rows that are not needed any more go by themselves.';
    END IF;
    RETURN OLD;
END $$;
CREATE TRIGGER keep_executor BEFORE DELETE ON sidings.executor FOR EACH ROW EXECUTE FUNCTION sidings.keep_executor();

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
    policy           smallint NOT NULL DEFAULT 0,    -- 0 serial, 1 latest, 2 parallel: sidings.jobs.Policy
    type             text NOT NULL,
    origin           text NOT NULL,
    "group"          text,
    unique_key       text,
    held             text,
    headers          jsonb,                -- refuses \u0000, so that ->> in cycle and acquire can never fail
    payload          json,                 -- json, not jsonb: kept to the letter, cheaper to store, any \u0000 allowed
    error            text,                 -- the last one of a job that failed, 'Class: message'
    CONSTRAINT job_pkey PRIMARY KEY (id),
    CONSTRAINT job_policy CHECK (policy BETWEEN 0 AND 2),
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
-- Refills of one group; "has this group jobs".
CREATE INDEX job_group ON sidings.job (origin, "group", position) WHERE "group" IS NOT NULL;
-- Promotion of delayed jobs in due order; of those due at one moment, in the order in which they were enqueued. Without the
-- id each statement would sort all of that moment for its thousand.
CREATE INDEX job_due ON sidings.job (origin, run_at, id) WHERE position IS NULL AND held IS NULL;
-- What waits for a person.
CREATE INDEX job_held ON sidings.job (origin) WHERE held IS NOT NULL;
-- The heads that keep their group waiting: they back off, or are blocked for good ('infinity'). Ordinary jobs do not
-- stand in it; failures without a further attempt are those that a newer job of policy "latest" has inherited.
CREATE INDEX job_backoff ON sidings.job (run_at) WHERE position IS NOT NULL AND (attempt > 1 OR failures > 0);
-- Is a message of this key parked? A consumer asks it for every key of every batch, so the answer must not depend on how
-- many jobs of other types wait in the key's group: an index of its own, which is empty while nothing is parked. Jobs of
-- other types cost it one comparison at their insert.
CREATE INDEX job_message ON sidings.job (origin, "group") WHERE position IS NOT NULL AND type LIKE 'message:%';
-- A key is taken until its job ends: the row is there until then, also while the job runs, backs off or is held. Partial:
-- jobs without a key pay nothing for it.
CREATE UNIQUE INDEX job_unique_key ON sidings.job (type, unique_key) WHERE unique_key IS NOT NULL;

CREATE TYPE sidings.outcome AS ENUM
    ('succeeded', 'retried', 'snoozed', 'discarded', 'cancelled', 'superseded', 'lost', 'held');

-- ACQUIRE and TAKEOVER, called in autocommit. plpgsql, because every statement of it gets a fresh snapshot:
-- what is read after a lock wait is what the former owner last committed. Lock order: origin (by name), then
-- executor. An origin that the caller itself owns is treated as free: it asks only for origins that it does
-- not hold in memory, so its lease ran out unnoticed by others; nothing was lost.
-- Epochs are larger than all of former timelines: those that a failover has lost are not handed out a second time, and
-- receivers of fencing tokens have seen none that is larger.
--   trust_expiry   false for one lease after the server's identity changed: expiry times may be old
CREATE FUNCTION sidings.acquire(me uuid, wanted text[], generation bigint, lease interval, trust_expiry boolean)
RETURNS TABLE (acquired text, acquired_epoch bigint, losses bigint, former uuid)
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    o     record;
    ids   bigint[];
    first bigint;  -- epoch of this timeline
BEGIN
    INSERT INTO sidings.origin (origin)
    SELECT w FROM unnest(wanted) w
    WHERE NOT EXISTS (SELECT FROM sidings.origin x WHERE x.origin = w)
    ORDER BY w
    ON CONFLICT DO NOTHING;

    first := (('x' || sidings.timeline())::bit(32)::bigint - 1) * 1000000000;
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

-- The fence of a cycle: lock the executor's row by its id, which waits for a cycle that is at work, then compare and set.
-- Each statement in here has a snapshot of its own, so what was waited for is seen by the comparison. As a part of the
-- cycle's statement it would either pass the row over or be looked at again, with all of that statement's plan set up anew
-- (docs/decisions/0018-two-cycles.md). Returns whether the cycle may go on; if not, it is void.
CREATE FUNCTION sidings.begin_cycle(me uuid, number bigint, its_fence bigint, named bigint[], its_timeline text) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM sidings.executor e WHERE e.id = me FOR NO KEY UPDATE;
    UPDATE sidings.executor e SET running = named, cycle = number
    WHERE e.id = me AND e.cycle = number - 1 AND e.fence = its_fence
          AND (its_timeline IS NULL OR sidings.timeline() = its_timeline);
    RETURN FOUND;
END
$$;

-- The end of a transactional handler: fence, then delete, the last thing before COMMIT (fencing first would block
-- renewals for as long as the handler runs). KEY SHARE conflicts with a takeover, not with a renewal; the caller sets a
-- short idle_in_transaction_session_timeout with it, so that a pause before its COMMIT ends in a rollback. started_ago
-- counts from the arrival of the statement, whatever that waits for, as in a cycle. SD001: the origin has another owner
-- or epoch, or the job was read from another timeline (null: it is not known). SD002: this attempt is over already.
CREATE FUNCTION sidings.finish(me uuid, its_origin text, its_epoch bigint, its_id bigint, its_attempt integer,
                               started_ago float8, keep_history boolean, its_timeline text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' SET enable_seqscan = off AS $$
DECLARE
    ended sidings.job;
BEGIN
    PERFORM 1 FROM sidings.origin o
    WHERE o.origin = its_origin AND o.owner = me AND o.epoch = its_epoch
    FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'epoch % of origin % is superseded', its_epoch, its_origin USING ERRCODE = 'SD001';
    END IF;
    IF its_timeline <> sidings.timeline() THEN
        RAISE EXCEPTION 'attempt % of job % was read before a failover', its_attempt, its_id USING ERRCODE = 'SD001';
    END IF;
    DELETE FROM sidings.job j WHERE j.id = its_id AND j.attempt = its_attempt RETURNING j.* INTO ended;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'attempt % of job % is over already', its_attempt, its_id USING ERRCODE = 'SD002';
    END IF;
    IF keep_history THEN
        INSERT INTO sidings.job_history (job_id, epoch, enqueued_at, due_at, started_at, finished_at, executor, attempt,
                                         outcome, priority, type, origin, "group", correlation_id)
        VALUES (ended.id, its_epoch, ended.enqueued_at, ended.run_at,
                statement_timestamp() - started_ago * interval '1 second', clock_timestamp(), me, ended.attempt, 'succeeded',
                ended.priority, ended.type, ended.origin, ended."group", ended.headers ->> 'correlation_id');
    END IF;
END $$;

-- How far the ticks of each schedule have been turned into jobs (docs/periodic.md).
--
-- One row per periodic job type; for those of every origin, one per origin. A tick becomes a job in the statement that
-- moves `last_tick` to it by compare-and-set, so whoever tries, there is one job per tick.
CREATE TABLE sidings.periodic (
    since      timestamptz NOT NULL DEFAULT clock_timestamp(),    -- when this schedule came into force: no tick before it counts
    seen_at    timestamptz NOT NULL DEFAULT clock_timestamp(),    -- when an executor with this schedule last looked
    last_tick  timestamptz,                                       -- the last one that became a job; null: none yet
    name       text NOT NULL,                                     -- the job type
    origin     text NOT NULL DEFAULT '',                          -- '': per service
    schedule   text NOT NULL,                                     -- in force: 'cron, time zone' or 'every n s'
    job_origin text,                                              -- where the last tick's job went
    CONSTRAINT periodic_pkey PRIMARY KEY (name, origin)
) WITH (
    fillfactor = 50,                       -- no index holds what changes: HOT updates
    autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_scale_factor = 0
);

-- Whether a tick of this periodic job waits or runs in this origin. Volatile: a snapshot of its own, for it is asked under
-- the lock of its row in `periodic`, and what had that lock before may have released one there, or moved it there. Plan:
-- job_group.
CREATE FUNCTION sidings.tick_waits(its_type text, its_origin text) RETURNS boolean
LANGUAGE sql VOLATILE SET enable_seqscan = off SET enable_bitmapscan = off
RETURN EXISTS (SELECT FROM sidings.job j
               WHERE j.origin = its_origin AND j."group" = its_type AND j.type = its_type AND j.held IS NULL);
