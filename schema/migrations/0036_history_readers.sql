-- The days of the history belong to its owner, and whoever may read it may read all of them.
-- runs with 0019

-- What a day's partition has of the history: its owner, else who made it, as a member of the owner's role or a superuser, would be the only
-- one who can drop or archive it; and its readers. Not where policies say which rows they see: a partition has none of them.
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

-- As in 0013, with owner and readers.
CREATE OR REPLACE FUNCTION sidings.make_history_day(its_day date) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '300ms' AS $$
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
    PERFORM sidings.share_history_day(to_regclass('sidings.' || part));
    EXECUTE format('ALTER TABLE sidings.job_history ATTACH PARTITION sidings.%I FOR VALUES FROM (%L) TO (%L)',
                   part, its_day::timestamp AT TIME ZONE 'UTC', (its_day + 1)::timestamp AT TIME ZONE 'UTC');
END $$;

-- The days that are there already. One that is in use, or is another role's than ours, stays as it is.
DO $$
DECLARE
    part regclass;
BEGIN
    FOR part IN
        SELECT i.inhrelid FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'sidings.job_history'::regclass AND c.relname ~ '^job_history_\d{8}$'
    LOOP
        BEGIN
            PERFORM sidings.share_history_day(part);
        EXCEPTION WHEN insufficient_privilege OR lock_not_available OR deadlock_detected THEN
            RAISE LOG 'sidings: % keeps its owner and readers: %', part, SQLERRM;
        END;
    END LOOP;
END $$;
