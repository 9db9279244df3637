-- The table of yesterday's message ids is there in the first hour of a day.
-- runs with 0019

-- As in 0008, but: in the first hour of a day, in which ids are recorded under the day before as well, that day's table is made, too. Where it
-- was missing, as of a schema that is an hour old, a handler's transaction made it, and all other messages waited for that one's end.
--   at   the time; for tests
DROP FUNCTION sidings.maintain_seen(integer);
CREATE FUNCTION sidings.maintain_seen(keep_days integer, at timestamptz DEFAULT now()) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    today constant date := (at AT TIME ZONE 'UTC')::date;
    d   date := ((at - interval '1 hour') AT TIME ZONE 'UTC')::date;
    old record;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('sidings.maintain_seen', 0)) THEN
        RETURN;
    END IF;
    WHILE d <= today + 2 LOOP
        PERFORM sidings.make_seen_day(d);
        d := d + 1;
    END LOOP;
    FOR old IN
        SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'sidings.message_seen'::regclass
          AND to_date(right(c.relname, 8), 'YYYYMMDD') < today - keep_days
        ORDER BY c.relname
    LOOP
        BEGIN
            PERFORM set_config('lock_timeout', '500ms', true);
            EXECUTE format('DROP TABLE sidings.%I', old.relname);
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            RAISE LOG 'sidings: % is in use and will be dropped later', old.relname;
        END;
    END LOOP;
END $$;
