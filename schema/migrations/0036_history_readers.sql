-- Who may read the history may lock its days, as an analysis does so that none is dropped meanwhile.
-- runs with 0019

-- As in 0013, and who may read the history may read its new day. Not where policies say which rows of it: a partition has none of them.
CREATE OR REPLACE FUNCTION sidings.make_history_day(its_day date) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '300ms' AS $$
DECLARE
    part text := 'job_history_' || to_char(its_day, 'YYYYMMDD');
    who  text;
BEGIN
    LOCK TABLE sidings.job_history IN SHARE ROW EXCLUSIVE MODE;
    IF to_regclass('sidings.' || part) IS NOT NULL THEN
        RETURN;  -- another was quicker
    END IF;
    EXECUTE format('CREATE TABLE sidings.%I (LIKE sidings.job_history INCLUDING DEFAULTS)', part);
    EXECUTE format('WITH moved AS (DELETE FROM sidings.job_history_default WHERE finished_at >= %L AND '
                   'finished_at < %L RETURNING *) INSERT INTO sidings.%I SELECT * FROM moved',
                   its_day::timestamp AT TIME ZONE 'UTC', (its_day + 1)::timestamp AT TIME ZONE 'UTC', part);
    FOR who IN
        SELECT DISTINCT CASE g.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(g.grantee)) END
        FROM pg_class c, aclexplode(c.relacl) g
        WHERE c.oid = 'sidings.job_history'::regclass AND NOT c.relrowsecurity
          AND g.privilege_type = 'SELECT' AND g.grantee <> c.relowner
    LOOP
        EXECUTE format('GRANT SELECT ON sidings.%I TO %s', part, who);
    END LOOP;
    EXECUTE format('ALTER TABLE sidings.job_history ATTACH PARTITION sidings.%I FOR VALUES FROM (%L) TO (%L)',
                   part, its_day::timestamp AT TIME ZONE 'UTC', (its_day + 1)::timestamp AT TIME ZONE 'UTC');
END $$;
