-- The history of jobs: its days, their retention, and the archive of those that are in Parquet (docs/history.md).

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
-- Retention, and the analysis of a time.
CREATE INDEX job_history_finished ON sidings.job_history USING brin (finished_at) WITH (pages_per_range = 32, autosummarize = on);
-- A missing day must never stall the cycle.
CREATE TABLE sidings.job_history_default PARTITION OF sidings.job_history DEFAULT;

-- What the archive has: a file for each partition that the day has had. A day gets another one when a row comes after the
-- first was dropped.
CREATE TABLE sidings.history_archive (
    day         date NOT NULL,
    part        integer NOT NULL,
    rows        bigint NOT NULL,
    location    text NOT NULL,
    archived_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    dropped_at  timestamptz,
    CONSTRAINT history_archive_pkey PRIMARY KEY (day, part)
);

-- Rows that came into a day while it was archived or after. An attempt's row may come late: an outcome that waited for
-- Postgres, or an action of a person in a transaction that stayed open. Rows are inserted, never updated: writers do not
-- wait for each other.
CREATE TABLE sidings.history_late (
    id  bigint GENERATED ALWAYS AS IDENTITY,
    day date NOT NULL,
    CONSTRAINT history_late_pkey PRIMARY KEY (id)
);
CREATE INDEX history_late_day ON sidings.history_late (day);

-- Notes a late row under the day whose partition it came into, which is not always the day of its time (make_history_day).
-- Under another day, its own would be taken for archived with all of its rows, and dropped.
CREATE FUNCTION sidings.note_late_row() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO sidings.history_late (day) VALUES (to_date(right(TG_TABLE_NAME, 8), 'YYYYMMDD'));
    RETURN NULL;
END $$;

-- From now on rows that come into that day are noted. Waits for those that are being written: what they hold is then in
-- every snapshot that is taken after this.
CREATE FUNCTION sidings.watch_history_day(its_day date) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
BEGIN
    EXECUTE format('CREATE OR REPLACE TRIGGER note_late_row AFTER INSERT ON sidings.%I FOR EACH ROW '
                   'EXECUTE FUNCTION sidings.note_late_row()', 'job_history_' || to_char(its_day, 'YYYYMMDD'));
END $$;

-- Whether all rows of that day's present partition are in the archive.
CREATE FUNCTION sidings.history_archived(its_day date) RETURNS boolean
LANGUAGE sql VOLATILE  -- volatile: a snapshot of its own, for it is asked again under a lock
RETURN EXISTS (SELECT FROM sidings.history_archive a WHERE a.day = its_day AND a.dropped_at IS NULL)
       AND NOT EXISTS (SELECT FROM sidings.history_late l WHERE l.day = its_day);

-- What a day's partition has of the history: its owner, else who made it, as a member of the owner's role or a superuser,
-- would be the only one who can drop or archive it; and its readers. Not where policies say which rows they see: a
-- partition has none of them.
CREATE FUNCTION sidings.share_history_day(part regclass) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '300ms' AS $$
DECLARE
    its_owner oid := (SELECT c.relowner FROM pg_class c WHERE c.oid = 'sidings.job_history'::regclass);
    who       text;
BEGIN
    IF (SELECT c.relowner FROM pg_class c WHERE c.oid = part) <> its_owner THEN
        BEGIN
            EXECUTE format('ALTER TABLE %s OWNER TO %I', part, pg_get_userbyid(its_owner));
        EXCEPTION WHEN insufficient_privilege THEN   -- the owner may not create in its schema any more
            RAISE LOG 'sidings: % does not get the owner of the history: %', part, SQLERRM;
        END;
    END IF;
    FOR who IN
        SELECT DISTINCT CASE g.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(g.grantee)) END
        FROM pg_class c, aclexplode(c.relacl) g
        WHERE c.oid = 'sidings.job_history'::regclass AND NOT c.relrowsecurity
          AND g.privilege_type = 'SELECT' AND g.grantee <> c.relowner
    LOOP
        EXECUTE format('GRANT SELECT ON %s TO %s', part, who);
    END LOOP;
END $$;

-- The partition of one day, with what the default partition has of it, with owner and readers. Cycles wait for the few
-- milliseconds that this takes. Else rows come into the default partition between the move and ATTACH, which then fails,
-- again and again under load; and a lock on the default alone makes the cycles fail that were about to insert there.
--
-- It takes the default partition for itself. A backup or a report that reads that for hours would keep all cycles waiting
-- each time that it is tried, so the lock is soon given up: there are two days' time for it.
--
-- A day begins and ends at midnight in UTC, however the database writes its times: the bounds are written in ISO. In
-- another DateStyle they go by an abbreviation of the database's zone, of which Postgres before 18 knows only one
-- meaning: a day of Asia/Shanghai (CST) begins 14 hours late. Such a day reaches into the next one, which then begins
-- where it ends.
--
-- MATERIALIZED: once Postgres has analysed pg_inherits, it may go through all of pg_class and join the days to that. It
-- would read the bounds of all other partitioned tables as times, and those by numbers or texts are none: an error, and
-- no day is made.
CREATE FUNCTION sidings.make_history_day(its_day date) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '300ms' SET DateStyle = 'ISO' SET TimeZone = 'UTC' AS $$
DECLARE
    part  text := 'job_history_' || to_char(its_day, 'YYYYMMDD');
    first timestamptz := its_day::timestamp AT TIME ZONE 'UTC';
    next  timestamptz := (its_day + 1)::timestamp AT TIME ZONE 'UTC';
BEGIN
    LOCK TABLE sidings.job_history IN SHARE ROW EXCLUSIVE MODE;
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

-- Partitions of the history: made two days ahead, dropped `keep_days` after their day; rows of executors that are long
-- gone are removed. Called by every executor now and then; one at a time does the work.
--
-- First what needs no lock on the history, so that cycles do not wait for it, and only so much at once as takes a second
-- or two: a call that takes longer than `call_seconds` has done nothing, and is made again each minute. A day of which
-- the default partition holds many rows stays there, since to move them takes too long; so do all where it is so large
-- that to look through it, which ATTACH does, takes too long. A day ahead that cannot be made just now is made another
-- time, and nothing else waits for it. A day that cannot be dropped, for whatever reason, as a view on it, is dropped
-- another time.
--
-- Where the history is archived, days are dropped only when all of their rows are, and rows of days without a partition
-- stay in the default one until the archive makes one of them.
CREATE FUNCTION sidings.maintain(keep_days integer) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' SET enable_bitmapscan = on AS $$  -- for the BRIN index
DECLARE
    today     date := (now() AT TIME ZONE 'UTC')::date;
    archiving boolean := coalesce((SELECT s.archive_history FROM sidings.service s), false);
    d         date;
    old       record;
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
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            IF d = today THEN
                RAISE;   -- tried again in a minute: meanwhile its rows gather in the default partition
            END IF;
            RAISE LOG 'sidings: the history of % gets its partition later, the tables are in use', d;
        END;
    END LOOP;
    FOR old IN
        SELECT c.relname, to_date(right(c.relname, 8), 'YYYYMMDD') AS day FROM pg_inherits i
        JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'sidings.job_history'::regclass AND c.relname ~ '^job_history_\d{8}$'
          AND to_date(right(c.relname, 8), 'YYYYMMDD') < today - keep_days
    LOOP
        CONTINUE WHEN archiving AND NOT sidings.history_archived(old.day);
        -- A long query over the history must not keep tomorrow's partition from being made, nor make cycles
        -- queue up behind us: the day is dropped another time.
        BEGIN
            PERFORM set_config('lock_timeout', '100ms', true);
            EXECUTE format('LOCK TABLE sidings.%I IN ACCESS EXCLUSIVE MODE', old.relname);
            CONTINUE WHEN archiving AND NOT sidings.history_archived(old.day);  -- a writer that we have waited for
            EXECUTE format('DROP TABLE sidings.%I', old.relname);
            UPDATE sidings.history_archive a SET dropped_at = now() WHERE a.day = old.day AND a.dropped_at IS NULL;
            DELETE FROM sidings.history_late l WHERE l.day = old.day;
        EXCEPTION WHEN OTHERS THEN   -- in use, or something depends on it
            RAISE LOG 'sidings: % will be dropped later: %', old.relname, SQLERRM;
        END;
    END LOOP;
END $$;

-- The first days, so that no row begins its life in the default partition.
SELECT sidings.maintain(30);
