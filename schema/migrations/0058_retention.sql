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
