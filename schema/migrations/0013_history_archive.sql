-- The archive of the history: which days are in Parquet, and retention that waits for it (docs/history.md).

-- Whether retention drops only what has been archived. A fact about the data, not about a process: one instance that was started
-- without such a setting would drop days for all.
ALTER TABLE sidings.service ADD COLUMN archive_history boolean NOT NULL DEFAULT false;

-- What the archive has: a file for each partition that the day has had. A day gets another one when a row comes after the first
-- was dropped.
CREATE TABLE sidings.history_archive (
    day         date NOT NULL,
    part        integer NOT NULL,
    rows        bigint NOT NULL,
    location    text NOT NULL,
    archived_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    dropped_at  timestamptz,
    CONSTRAINT history_archive_pkey PRIMARY KEY (day, part)
);

-- Rows that came into a day while it was archived or after. An attempt's row may come late: an outcome that waited for Postgres, or
-- an action of a person in a transaction that stayed open. Rows are inserted, never updated: writers do not wait for each other.
CREATE TABLE sidings.history_late (
    id  bigint GENERATED ALWAYS AS IDENTITY,
    day date NOT NULL,
    CONSTRAINT history_late_pkey PRIMARY KEY (id)
);
CREATE INDEX history_late_day ON sidings.history_late (day);

CREATE FUNCTION sidings.note_late_row() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO sidings.history_late (day) VALUES ((NEW.finished_at AT TIME ZONE 'UTC')::date);
    RETURN NULL;
END $$;

-- The partition of one day, with what the default partition has of it. Cycles wait for the few milliseconds that this takes. Else
-- rows come into the default partition between the move and ATTACH, which then fails, again and again under load; and a lock on the
-- default alone makes the cycles fail that were about to insert there.
CREATE FUNCTION sidings.make_history_day(its_day date) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    part text := 'job_history_' || to_char(its_day, 'YYYYMMDD');
BEGIN
    LOCK TABLE sidings.job_history IN SHARE ROW EXCLUSIVE MODE;
    IF to_regclass('sidings.' || part) IS NOT NULL THEN
        RETURN;  -- another was quicker
    END IF;
    EXECUTE format('CREATE TABLE sidings.%I (LIKE sidings.job_history INCLUDING DEFAULTS)', part);
    EXECUTE format('WITH moved AS (DELETE FROM sidings.job_history_default WHERE finished_at >= %L AND '
                   'finished_at < %L RETURNING *) INSERT INTO sidings.%I SELECT * FROM moved',
                   its_day::timestamp AT TIME ZONE 'UTC', (its_day + 1)::timestamp AT TIME ZONE 'UTC', part);
    EXECUTE format('ALTER TABLE sidings.job_history ATTACH PARTITION sidings.%I FOR VALUES FROM (%L) TO (%L)',
                   part, its_day::timestamp AT TIME ZONE 'UTC', (its_day + 1)::timestamp AT TIME ZONE 'UTC');
END $$;

-- From now on rows that come into that day are noted. Waits for those that are being written: what they hold is then in every
-- snapshot that is taken after this.
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

-- As before, and: where the history is archived, days are dropped only when all of their rows are, and rows of days without a
-- partition stay in the default one until the archive makes one of them.
CREATE OR REPLACE FUNCTION sidings.maintain(keep_days integer) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    today     date := (now() AT TIME ZONE 'UTC')::date;
    archiving boolean := coalesce((SELECT s.archive_history FROM sidings.service s), false);
    d         date;
    old       record;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('sidings.maintain', 0)) THEN
        RETURN;
    END IF;
    FOR d IN SELECT today + n FROM generate_series(0, 2) n LOOP
        CONTINUE WHEN to_regclass('sidings.job_history_' || to_char(d, 'YYYYMMDD')) IS NOT NULL;
        PERFORM sidings.make_history_day(d);
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
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            RAISE LOG 'sidings: % is in use and will be dropped later', old.relname;
        END;
    END LOOP;
    IF NOT archiving THEN
        DELETE FROM sidings.job_history_default WHERE finished_at < (today - keep_days)::timestamp AT TIME ZONE 'UTC';
    END IF;
    DELETE FROM sidings.executor e
    WHERE e.started_at < now() - interval '1 day'
      AND NOT EXISTS (SELECT FROM sidings.origin o WHERE o.owner = e.id);
END $$;
