-- Upkeep of the history that nobody else's work is kept waiting for, and that one table does not stop.
-- runs with 0019

-- To make a day takes the default partition for itself. A backup or a report that reads that for hours, begun before the first look of a
-- new day, kept all cycles waiting for two seconds each time, once a minute for each instance. There are two days' time for it.
ALTER FUNCTION sidings.make_history_day(date) SET lock_timeout = '300ms';

-- As in 0017, but: a day ahead that cannot be made just now is made another time, an hour later, and nothing else waits for it. So is one
-- that cannot be dropped, for whatever reason: a view on an old day undid all of it, the days ahead included.
CREATE OR REPLACE FUNCTION sidings.maintain(keep_days integer) RETURNS void
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
