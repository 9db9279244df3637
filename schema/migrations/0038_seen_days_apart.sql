-- A day of message ids that cannot be dropped keeps no other from being dropped, nor the days ahead from being made.
-- runs with 0019

-- As in 0037, but: whatever keeps a day from being dropped, as that the role is not its owner, or a view on it, is that day's alone. It undid
-- the days ahead as well: the first message of each day made its table in its handler's transaction, and all others waited for that one's end.
-- Locks are waited for for two seconds in all, whichever days they are of, and the rest is left for another time: half a second for each of
-- twenty days was more than the statement has, which undid the same.
CREATE OR REPLACE FUNCTION sidings.maintain_seen(keep_days integer, at timestamptz DEFAULT now()) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '2s' AS $$
DECLARE
    today constant date := (at AT TIME ZONE 'UTC')::date;
    d   date := ((at - interval '1 hour') AT TIME ZONE 'UTC')::date;
    old record;
    until timestamptz;
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
        SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'sidings.message_seen'::regclass
          AND to_date(right(c.relname, 8), 'YYYYMMDD') < today - keep_days
        ORDER BY random()   -- a few that are in use for long keep no others from their turn
    LOOP
        EXIT WHEN clock_timestamp() > until;
        BEGIN
            PERFORM set_config('lock_timeout', '500ms', true);
            EXECUTE format('DROP TABLE sidings.%I', old.relname);
        EXCEPTION WHEN OTHERS THEN   -- in use, another's, or something depends on it
            RAISE LOG 'sidings: % will be dropped later: %', old.relname, SQLERRM;
        END;
    END LOOP;
END $$;
