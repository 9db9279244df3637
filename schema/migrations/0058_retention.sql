-- runs with 0051
--
-- Old days are dropped also where they are much in use. Each function is written out once more; what has changed stands above
-- it.

-- As before, but the longer days are overdue, the longer a lock is waited for: a second more for each of them, up to three in
-- all. Each transaction of a consumer keeps all days from its first statement on, so with slow handlers on several instances
-- half a second was never enough, and the ids grew for ever. Who comes meanwhile waits behind, shortly (kafka/record_seen.sql),
-- and tries its messages again a second later. Once a day is dropped no writer is there until the end: then only readers of
-- single days are waited for, and the others go at once, whatever time the first has taken.
CREATE OR REPLACE FUNCTION sidings.maintain_seen(keep_days integer, at timestamptz DEFAULT now()) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    today constant date := (at AT TIME ZONE 'UTC')::date;
    d   date := ((at - interval '1 hour') AT TIME ZONE 'UTC')::date;
    old record;
    until timestamptz;
    alone boolean := false;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('sidings.maintain_seen', 0)) THEN
        RETURN;
    END IF;
    WHILE d <= today + 2 LOOP
        PERFORM sidings.make_seen_day(d);
        d := d + 1;
    END LOOP;
    until := clock_timestamp() + interval '2 seconds';
    FOR old IN
        SELECT c.relname, least(500 + 1000 * count(*) FILTER (
                   WHERE c.relname < 'message_seen_' || to_char(today - keep_days - 1, 'YYYYMMDD')) OVER (), 3000) AS most_ms
        FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'sidings.message_seen'::regclass
          AND c.relname < 'message_seen_' || to_char(today - keep_days, 'YYYYMMDD')
        ORDER BY random()   -- a few that are in use for long keep no others from their turn
    LOOP
        EXIT WHEN clock_timestamp() > until;
        BEGIN
            PERFORM set_config('lock_timeout', CASE WHEN alone THEN '100ms' ELSE old.most_ms || 'ms' END, true);
            EXECUTE format('DROP TABLE sidings.%I', old.relname);
            IF NOT alone THEN
                alone := true;
                until := clock_timestamp() + interval '2 seconds';
            END IF;
        EXCEPTION WHEN OTHERS THEN   -- in use, another's, or something depends on it
            RAISE LOG 'sidings: % will be dropped later: %', old.relname, SQLERRM;
        END;
    END LOOP;
END $$;

-- As before, but old days are dropped for two seconds in all, whichever they are. A hundred that were in use, as in a backup,
-- took longer than a call may, and undid the days ahead, too.
CREATE OR REPLACE FUNCTION sidings.maintain(keep_days integer) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' SET enable_bitmapscan = on AS $$  -- for the BRIN index
DECLARE
    today     date := (now() AT TIME ZONE 'UTC')::date;
    archiving boolean := coalesce((SELECT s.archive_history FROM sidings.service s), false);
    d         date;
    old       record;
    until     timestamptz;
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
    until := clock_timestamp() + interval '2 seconds';
    FOR old IN
        SELECT c.relname, to_date(right(c.relname, 8), 'YYYYMMDD') AS day FROM pg_inherits i
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
            EXECUTE format('DROP TABLE sidings.%I', old.relname);
            UPDATE sidings.history_archive a SET dropped_at = now() WHERE a.day = old.day AND a.dropped_at IS NULL;
            DELETE FROM sidings.history_late l WHERE l.day = old.day;
        EXCEPTION WHEN OTHERS THEN   -- in use, or something depends on it
            RAISE LOG 'sidings: % will be dropped later: %', old.relname, SQLERRM;
        END;
    END LOOP;
END $$;
