-- The days of the history and of message ids are kept up whatever else is in the database, and whatever plan Postgres chooses for its catalogs.
-- runs with 0019

-- Once it has analysed pg_inherits, Postgres goes through all of pg_class and joins the days to that: for some thirty of them, through PgBouncer
-- for ten. What only the days can be asked for, all other tables were asked for as well, which was an error.

-- As in 0039, but: no other table's bounds are read as times. With one that is divided by numbers or texts, as payments by a bigint, no day
-- was made any more, and none dropped.
CREATE OR REPLACE FUNCTION sidings.make_history_day(its_day date) RETURNS void
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

-- As in 0038, but: which days are old their names tell, which are compared as they are. All tables' names were read as dates; that undid the
-- days ahead, too, and no day was dropped any more.
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
          AND c.relname < 'message_seen_' || to_char(today - keep_days, 'YYYYMMDD')
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
