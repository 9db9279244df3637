-- What the role at work owns of the schema $1, of the names $2 and the days of history and ids, though another role owns the schema's
-- tables: as commands that give it to that one, if they may. Sequences of columns and indexes go with their table, arrays with their
-- type. SECURITY DEFINER, only what was made just now: else somebody has decided with whose rights it runs. That is what one of our
-- own ids has made, each of which we have locked. age(xmin) <= 0 holds for what is 2^31 transactions old as well.
WITH its AS (
    SELECT c.relnamespace AS schema, c.relowner AS owner FROM pg_class c WHERE c.oid = to_regclass($1 || '.migration')
), ours (kind, name) AS (
    SELECT 'TABLE', c.oid::regclass::text FROM its, pg_class c
    WHERE c.relnamespace = its.schema AND c.relowner = quote_ident(current_user)::regrole AND c.relkind IN ('r', 'p', 'v', 'S')
      AND (c.relname::text = ANY ($2::text[]) OR c.relname ~ '^(job_history|message_seen)_\d{8}$')
      AND NOT EXISTS (SELECT FROM pg_depend d WHERE c.relkind = 'S' AND d.classid = 'pg_class'::regclass AND d.objid = c.oid
                                                AND d.deptype IN ('a', 'i'))
    UNION ALL
    SELECT 'TYPE', t.oid::regtype::text FROM its, pg_type t
    WHERE t.typnamespace = its.schema AND t.typowner = quote_ident(current_user)::regrole AND t.typtype IN ('e', 'd')
      AND t.typname::text = ANY ($2::text[])
    UNION ALL
    SELECT 'ROUTINE', p.oid::regprocedure::text FROM its, pg_proc p
    WHERE p.pronamespace = its.schema AND p.proowner = quote_ident(current_user)::regrole AND p.proname::text = ANY ($2::text[])
      AND (NOT p.prosecdef OR p.xmin IN (SELECT l.transactionid FROM pg_locks l WHERE l.pid = pg_backend_pid()))
)
SELECT format('ALTER %s %s OWNER TO %I', o.kind, o.name, pg_get_userbyid(its.owner)) FROM its, ours o
WHERE its.owner <> quote_ident(current_user)::regrole
  AND pg_has_role(its.owner, CASE WHEN current_setting('server_version_num')::int < 160000 THEN 'MEMBER' ELSE 'SET' END)
  AND (has_schema_privilege(its.owner, its.schema, 'CREATE') OR (SELECT r.rolsuper FROM pg_roles r WHERE r.rolname = current_user))
