-- A day of the history begins and ends at midnight in UTC, however the database writes its times.
-- runs with 0019

-- As in 0036, but: the bounds are written in ISO. In another DateStyle they went by an abbreviation of the database's zone, of which
-- Postgres before 18 knows only one meaning: the days of Asia/Shanghai (CST) began 14 hours late, those of Asia/Kolkata (IST) 3.5. Where
-- a day reaches into the next one because of that, the next one begins where it ends.
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
    SELECT greatest(first, max(k.until)) INTO first
    FROM (SELECT substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \(''(.+)''\)$')::timestamptz AS until
          FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'sidings.job_history'::regclass) k
    WHERE k.until < next;
    EXECUTE format('CREATE TABLE sidings.%I (LIKE sidings.job_history INCLUDING DEFAULTS)', part);
    EXECUTE format('WITH moved AS (DELETE FROM sidings.job_history_default WHERE finished_at >= %L AND '
                   'finished_at < %L RETURNING *) INSERT INTO sidings.%I SELECT * FROM moved', first, next, part);
    PERFORM sidings.share_history_day(to_regclass('sidings.' || part));
    EXECUTE format('ALTER TABLE sidings.job_history ATTACH PARTITION sidings.%I FOR VALUES FROM (%L) TO (%L)', part, first, next);
END $$;

-- As in 0013, but: of the day whose partition it is. A row that came late into one with other bounds was noted of the next day, so that
-- its own was taken for archived with all of its rows, and dropped.
CREATE OR REPLACE FUNCTION sidings.note_late_row() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO sidings.history_late (day) VALUES (to_date(right(TG_TABLE_NAME, 8), 'YYYYMMDD'));
    RETURN NULL;
END $$;
