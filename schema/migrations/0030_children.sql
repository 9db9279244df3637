-- Who owns a child of a directory table, or is a member of the owner's role in name only, has no code run with his rights either.
-- runs with 0019

-- As in 0029. The children of the table too: its owner may have made one since the set-up, and have given it away. Not every member of a role
-- may do what it may: from Postgres 16 on one can be without INHERIT and SET. And a way out that works for each kind.
CREATE OR REPLACE FUNCTION sidings.check_directory_owners(d sidings.directory) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    its_owner constant oid := (SELECT p.proowner FROM pg_proc p WHERE p.oid = 'sidings.directory_publish'::regproc);
    trusted   constant text := CASE WHEN current_setting('server_version_num')::int < 160000 THEN 'MEMBER'
                                    ELSE 'USAGE, SET, MEMBER WITH ADMIN OPTION' END;
    other     record;
BEGIN
    WITH RECURSIVE tables (oid) AS (
        SELECT d.relation::oid
        UNION
        SELECT i.inhrelid FROM tables t JOIN pg_inherits i ON i.inhparent = t.oid
    ), of_columns (attribute, oid) AS (
        SELECT a.attname, a.atttypid FROM pg_attribute a
        WHERE a.attrelid = d.relation AND a.attnum > 0 AND NOT a.attisdropped AND a.atttypid >= 16384    -- not Postgres' own
              AND (a.attname <> ALL (d.left_out) OR a.attname = ANY (d.key) OR a.attname = d.active)
        UNION
        SELECT y.attribute, x.oid
        FROM of_columns y JOIN pg_type t ON t.oid = y.oid,
             LATERAL (SELECT t.typbasetype AS oid WHERE t.typtype = 'd'
                      UNION ALL SELECT t.typelem WHERE t.typcategory = 'A'
                      UNION ALL SELECT f.atttypid FROM pg_attribute f
                                WHERE t.typtype = 'c' AND f.attrelid = t.typrelid AND f.attnum > 0 AND NOT f.attisdropped) x
        WHERE x.oid >= 16384
    ), types AS (
        SELECT y.attribute, t.oid, t.typowner, t.typrelid FROM of_columns y JOIN pg_type t ON t.oid = y.oid
        WHERE t.typtype <> 'd' AND t.typcategory <> 'A'
    ), parts (classid, objid, what) AS (
        SELECT 'pg_class'::regclass, i.indexrelid, 'of an index' FROM tables t JOIN pg_index i ON i.indrelid = t.oid
        UNION ALL
        SELECT 'pg_statistic_ext'::regclass, x.oid, 'of statistics' FROM tables t JOIN pg_statistic_ext x ON x.stxrelid = t.oid
        UNION ALL    -- worked out where the writer has set constraint_exclusion
        SELECT 'pg_constraint'::regclass, c.oid, 'of a constraint' FROM tables t JOIN pg_constraint c ON c.conrelid = t.oid
    ), functions (oid, what) AS (
        SELECT c.castfunc, format('of the column %s', t.attribute)
        FROM types t JOIN pg_cast c ON c.castsource = t.oid AND c.casttarget = 'json'::regtype
        UNION ALL
        SELECT coalesce(o.oprcode, x.refobjid), p.what
        FROM parts p JOIN pg_depend x ON x.classid = p.classid AND x.objid = p.objid
        LEFT JOIN pg_operator o ON o.oid = x.refobjid AND x.refclassid = 'pg_operator'::regclass
        WHERE x.refclassid IN ('pg_proc'::regclass, 'pg_operator'::regclass)
    ), owned (owner, kind, name, what) AS (
        SELECT c.relowner, 'TABLE', c.oid::regclass::text, CASE WHEN c.oid <> d.relation THEN 'a child' END
        FROM tables t JOIN pg_class c ON c.oid = t.oid
        UNION ALL    -- those of tables and of multiranges change hands with them
        SELECT t.typowner, CASE WHEN c.relkind <> 'c' THEN 'TABLE' ELSE 'TYPE' END,
               coalesce(r.rngtypid, t.oid)::regtype::text, format('of the column %s', t.attribute)
        FROM types t LEFT JOIN pg_class c ON c.oid = t.typrelid LEFT JOIN pg_range r ON r.rngmultitypid = t.oid
        UNION ALL
        SELECT p.proowner, 'FUNCTION', p.oid::regprocedure::text, f.what FROM functions f JOIN pg_proc p ON p.oid = f.oid
    )
    SELECT o.* INTO other FROM owned o WHERE NOT pg_has_role(o.owner, its_owner, trusted) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('name: the %s %s%s belongs to %s, whose code would run with the rights of %s, who owns the schema %s',
                             lower(other.kind), other.name, ', ' || other.what || format(' of %s,', d.relation),
                             pg_get_userbyid(other.owner), pg_get_userbyid(its_owner), rtrim('sidings.', '.')),
            HINT = format('ALTER %s %s OWNER TO %I%s', other.kind, other.name, pg_get_userbyid(its_owner), CASE
                          WHEN other.kind = 'FUNCTION' THEN ', or drop what uses it'
                          WHEN other.what LIKE 'of the column %' THEN ', or leave the column out (left_out)'
                          ELSE ' (to edit its rows, INSERT, UPDATE and DELETE are enough)' END)
                   || CASE WHEN (SELECT r.rolsuper FROM pg_roles r WHERE r.oid = its_owner)
                           THEN '. Under Rights, docs/directory-tables.md has a way for schemas of superusers.'
                           ELSE format('; or GRANT %I TO %I, who may then do all that it may.',
                                       pg_get_userbyid(its_owner), pg_get_userbyid(other.owner)) END;
    END IF;
END $$;

-- As in 0012, but for its hint: a role, or a database, may have another level for a default.
CREATE OR REPLACE FUNCTION sidings.lock_directory(name text) RETURNS regclass
LANGUAGE plpgsql AS $$
DECLARE
    relation constant regclass := to_regclass(name);
BEGIN
    IF relation IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = format('name: there is no table %L', name),
            HINT = 'Check the name, and put its schema before it where that is not in search_path.';
    ELSIF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION USING ERRCODE = 'SD004', MESSAGE = 'a directory table needs the isolation level READ COMMITTED here',
            HINT = 'Call it in a transaction of its own, after BEGIN ISOLATION LEVEL READ COMMITTED: what it read before it waited '
                   'for the lock would be out of date.';
    END IF;
    EXECUTE format('LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE', relation);
    RETURN relation;
END $$;

-- Better here, with nothing changed, than at the next edit.
SELECT sidings.check_directory_owners(x) FROM sidings.directory x JOIN pg_class c ON c.oid = x.relation;
