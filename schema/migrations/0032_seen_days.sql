-- A role that does not own the tables consumes with dedup, too.
-- runs with 0019

-- As in 0008, and with the rights of its owner: a partition can be made by nobody else, and the first id of a day makes it. Who may call it is
-- not asked, so of others than the owner it takes only the days that a consumer needs.
CREATE OR REPLACE FUNCTION sidings.make_seen_day(its_day date) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    part  constant text := 'message_seen_' || to_char(its_day, 'YYYYMMDD');
    today constant date := (clock_timestamp() AT TIME ZONE 'UTC')::date;
BEGIN
    IF to_regclass('sidings.' || part) IS NULL THEN
        IF its_day NOT BETWEEN today - 1 AND today + 2 AND NOT pg_has_role(session_user, current_user, 'MEMBER') THEN
            RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = format('its_day: %s is none to make now', its_day);
        END IF;
        LOCK TABLE sidings.message_seen IN SHARE UPDATE EXCLUSIVE MODE;
        IF to_regclass('sidings.' || part) IS NULL THEN
            EXECUTE format('CREATE TABLE sidings.%I (LIKE sidings.message_seen INCLUDING DEFAULTS)', part);
            EXECUTE format('ALTER TABLE sidings.message_seen ATTACH PARTITION sidings.%I FOR VALUES IN (%L)', part, its_day);
        END IF;
    END IF;
END $$;
