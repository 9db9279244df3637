-- Directory tables: tables that persons maintain, and whose rows services keep in memory, out of a compacted topic
-- (docs/directory-tables.md; docs/decisions/0022 has the reasons and the numbers).
--
-- A trigger publishes the STATE of each key that its statement has touched, read when the statement is over: the row, or
-- a tombstone. Which keys those are, the transition tables say. So it makes no difference that a trigger of the user's has
-- changed the row again meanwhile, whose own statement has ended, and published, before; nor in which order triggers fire.
--
-- ORDER. A key is touched only through its active row. The statement has locked that row, or has entered it into the unique
-- index, where another transaction's entry of the same key waits for our end. So the numbers of the outbox are drawn, key
-- by key, in the order of the commits. Rows that were and remain inactive are in no such order, and publish nothing.

CREATE TABLE sidings.directory (
    relation   regclass NOT NULL,
    topic      text NOT NULL,
    key        text[] NOT NULL,            -- columns
    active     text,                       -- column; null: every row is active
    left_out   text[] NOT NULL,            -- columns
    camel_case boolean NOT NULL,
    since      timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT directory_pkey PRIMARY KEY (relation),
    -- Two tables in one topic would overwrite each other's keys, without a lock in common.
    CONSTRAINT directory_topic UNIQUE (topic)
);

-- Keys of which a message may come late: it was sent by a relay that lost its slot or had no answer. What the table says of
-- them is published again at due_at, more than once, as nobody knows when the late one comes. It stands here and not in the
-- memory of a relay, since what makes messages late also kills relays.
CREATE TABLE sidings.directory_doubt (
    topic  text NOT NULL,
    key    bytea NOT NULL,
    since  timestamptz NOT NULL,
    due_at timestamptz NOT NULL,
    CONSTRAINT directory_doubt_pkey PRIMARY KEY (topic, key)
);
CREATE INDEX directory_doubt_due ON sidings.directory_doubt (topic, due_at);

-- terminal_id becomes terminalId, as Kafka Connect's ChangeCase (LOWER_UNDERSCORE to LOWER_CAMEL) makes it; also where
-- letters are Turkish ones (locale tr or az), where the capital of i has a dot, and the small one of I none.
CREATE FUNCTION sidings.camel_case(name text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN (SELECT string_agg(CASE WHEN n > 1 THEN upper(translate(left(word, 1), 'i', 'I')) ELSE lower(translate(left(word, 1), 'I', 'i')) END
                          || lower(translate(substr(word, 2), 'I', 'i')), '' ORDER BY n)
        FROM unnest(string_to_array(name, '_')) WITH ORDINALITY w (word, n));

-- Nobody's code but the owner's runs with the rights of the schema's owner.
--
-- Raises unless the table, its children, the types of its columns, and the functions that come with them belong to roles
-- that may do what the owner of the schema may. Rows are read, and made JSON, with his rights. What could run with them:
-- the cast of a type to json; and what an index, a constraint or statistics of the table ask of constants, which Postgres
-- works out when it plans a query.
--
-- By owners of tables and types, and not only by what there is: it may be made just before the statement runs that this is
-- asked for. The owner of the table stays, as the writer has locked it; but he may have made a child since the set-up, and
-- have given it away. Not every member of a role may do what it may: from Postgres 16 on one can be without INHERIT and
-- SET. Not asked for is the owner of a domain: only the type that it is made of counts.
CREATE FUNCTION sidings.check_directory_owners(d sidings.directory) RETURNS void
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

-- Raises unless rows of the table can be published as `d` says.
CREATE FUNCTION sidings.check_directory(d sidings.directory) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    its_owner constant oid := (SELECT p.proowner FROM pg_proc p WHERE p.oid = 'sidings.directory_publish'::regproc);
    rel     pg_class;
    col     record;
    other   text;
    problem text;
    remedy  text;
BEGIN
    SELECT * INTO rel FROM pg_class c WHERE c.oid = d.relation;
    SELECT u.argument, u.name, a.attnotnull, format_type(coalesce(nullif(t.typbasetype, 0), t.oid), NULL) AS type, t.typtype
    INTO col
    FROM (SELECT 'key', k FROM unnest(d.key) k UNION ALL SELECT 'active', d.active WHERE d.active IS NOT NULL
          UNION ALL SELECT 'left_out', l FROM unnest(d.left_out) l) u (argument, name)
    LEFT JOIN pg_attribute a ON a.attrelid = d.relation AND a.attname = u.name AND a.attnum > 0 AND NOT a.attisdropped
    LEFT JOIN pg_type t ON t.oid = a.atttypid
    WHERE a.attname IS NULL
       OR argument <> 'left_out' AND NOT a.attnotnull
       OR argument = 'active' AND coalesce(nullif(t.typbasetype, 0), t.oid) <> 'boolean'::regtype
       OR argument = 'key' AND t.typtype <> 'e' AND coalesce(nullif(t.typbasetype, 0), t.oid) <> ALL (
              '{text,varchar,bpchar,int2,int4,int8,numeric,uuid,date,timestamp,timestamptz,boolean}'::regtype[])
    LIMIT 1;
    SELECT x.relation::text INTO other FROM sidings.directory x WHERE x.topic = d.topic AND x.relation <> d.relation;
    CASE
        WHEN rel.relkind <> 'r' OR rel.relispartition
             OR EXISTS (SELECT FROM pg_inherits i WHERE d.relation IN (i.inhrelid, i.inhparent)) THEN
            problem := format('name: %s is no ordinary table', d.relation);
            remedy := 'A view, a foreign table, and one with partitions or children cannot be a directory table: changes would be missed.';
        WHEN rel.relpersistence <> 'p' THEN
            problem := format('name: %s is temporary or unlogged', d.relation);
            remedy := 'Make it an ordinary table: its rows would vanish without a message.';
        WHEN coalesce(d.topic, '') !~ '^[a-zA-Z0-9._-]{1,249}$' OR d.topic IN ('.', '..') THEN
            problem := format('topic: %L is no name of a topic', d.topic);
            remedy := 'Give the name of a compacted topic: letters, digits, dots, dashes and underscores.';
        WHEN other IS NOT NULL THEN
            problem := format('topic: %s is the topic of the table %s', d.topic, other);
            remedy := 'Give each table a topic of its own: they would overwrite each other''s keys.';
        WHEN coalesce(cardinality(d.key), 0) = 0 OR array_position(d.key, NULL) IS NOT NULL
             OR cardinality(d.key) <> (SELECT count(DISTINCT k) FROM unnest(d.key) k) THEN
            problem := format('key: %s names no columns, or one twice', coalesce(d.key::text, 'NULL'));
            remedy := 'Give the columns by which services look rows up, e.g. ''{terminal_id}''.';
        WHEN d.left_out IS NULL OR d.camel_case IS NULL THEN
            problem := 'left_out or camel_case is NULL';
            remedy := 'Leave the argument out.';
        WHEN col.name IS NOT NULL AND col.type IS NULL THEN
            problem := format('%s: %s has no column %L', col.argument, d.relation, col.name);
            remedy := 'Check the name; here it is written as it is stored, without quotes.';
        WHEN NOT col.attnotnull THEN
            problem := format('%s: the column %s of %s may be null', col.argument, col.name, d.relation);
            remedy := format('ALTER TABLE %s ALTER COLUMN %I SET NOT NULL.', d.relation, col.name);
        WHEN col.argument = 'active' THEN
            problem := format('active: the column %s of %s is of type %s', col.name, d.relation, col.type);
            remedy := 'Give a boolean: true while the row is in force.';
        WHEN col.argument = 'key' THEN
            problem := format('key: the column %s of %s is of type %s', col.name, d.relation, col.type);
            remedy := 'Give columns of text, whole or exact numbers, uuid, date, time stamps, boolean or an enum.';
        WHEN NOT EXISTS (
                SELECT FROM pg_index i
                WHERE i.indrelid = d.relation AND i.indisunique AND i.indimmediate AND i.indisvalid AND i.indisready
                  AND (SELECT array_agg(a.attname::text ORDER BY a.attname)
                       FROM generate_series(0, i.indnkeyatts - 1) n
                       LEFT JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[n])
                      = (SELECT array_agg(k ORDER BY k::name) FROM unnest(d.key) k)
                  AND (i.indpred IS NULL OR pg_get_expr(i.indpred, i.indrelid) IN (
                          quote_ident(d.active), '(' || quote_ident(d.active) || ' IS TRUE)',
                          '(' || quote_ident(d.active) || ' = true)'))) THEN
            problem := format('key: %s has no unique index on (%s)', d.relation, array_to_string(d.key, ', '));
            remedy := concat(format('CREATE UNIQUE INDEX ON %s (%s)', d.relation, (SELECT string_agg(quote_ident(k), ', ') FROM unnest(d.key) k)),
                             ' WHERE ' || quote_ident(d.active), '. A deferrable constraint, or one with another WHERE, will not do.');
        WHEN d.camel_case AND EXISTS (
                SELECT FROM pg_attribute a WHERE a.attrelid = d.relation AND a.attnum > 0 AND a.attname <> ALL (d.left_out)
                GROUP BY sidings.camel_case(a.attname) HAVING count(*) > 1) THEN
            problem := format('camel_case: two columns of %s would get the same name', d.relation);
            remedy := 'Leave one of them out (left_out), or keep the names as they are.';
        WHEN NOT has_table_privilege(its_owner, d.relation, 'SELECT') OR NOT has_schema_privilege(its_owner, rel.relnamespace, 'USAGE') THEN
            problem := format('name: the owner of the schema %s may not read %s', rtrim('sidings.', '.'), d.relation);
            remedy := format('GRANT SELECT ON %s TO %I (and USAGE on its schema): the triggers work with that role''s rights.',
                             d.relation, pg_get_userbyid(its_owner));
        ELSE
            PERFORM sidings.check_directory_owners(d);
            RETURN;
    END CASE;
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = problem, HINT = remedy;
END $$;

-- Raises where a writer at REPEATABLE READ or SERIALIZABLE may not see what the table is now: its snapshot has the former
-- topic, columns that are left out by now, and none that were added; and the former owners of what is read with the rights
-- of the schema's owner.
--
-- The trigger that fires is that of now, and a set-up makes new ones; functions that are asked for a trigger, or a column,
-- know what is there now as well. A row of the catalogs that was replaced since has an xmax that the snapshot does not see.
-- Children that are new leave no trace once a table has had one.
CREATE FUNCTION sidings.check_directory_snapshot(its_relation regclass, its_trigger name) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    since constant int := age(pg_snapshot_xmin(pg_current_snapshot())::xid);
BEGIN
    IF pg_get_triggerdef((SELECT t.oid FROM pg_trigger t WHERE t.tgrelid = its_relation AND t.tgname = its_trigger)) IS NULL
       OR EXISTS (SELECT FROM generate_series(1, (SELECT max(a.attnum) + 1 FROM pg_attribute a WHERE a.attrelid = its_relation)) n
                  LEFT JOIN pg_attribute a ON a.attrelid = its_relation AND a.attnum = n AND NOT a.attisdropped
                  WHERE (has_column_privilege(its_relation, n::smallint, 'SELECT') IS NULL) <> (a.attnum IS NULL))
       OR EXISTS (WITH RECURSIVE types (oid) AS (
                      SELECT a.atttypid FROM pg_attribute a
                      WHERE a.attrelid = its_relation AND a.attnum > 0 AND NOT a.attisdropped AND a.atttypid >= 16384
                      UNION
                      SELECT x.oid
                      FROM types y JOIN pg_type t ON t.oid = y.oid,
                           LATERAL (SELECT t.typbasetype AS oid UNION ALL SELECT t.typelem UNION ALL
                                    SELECT f.atttypid FROM pg_attribute f
                                    WHERE f.attrelid = t.typrelid AND f.attnum > 0 AND NOT f.attisdropped) x
                      WHERE x.oid >= 16384)
                  SELECT FROM pg_class c WHERE c.oid = its_relation AND age(c.xmax) <= since
                  UNION ALL
                  SELECT FROM types y JOIN pg_type t ON t.oid = y.oid LEFT JOIN pg_class c ON c.oid = t.typrelid
                  WHERE age(t.xmax) <= since OR age(c.xmax) <= since) THEN
        RAISE EXCEPTION USING ERRCODE = 'serialization_failure',
            MESSAGE = format('could not serialize access: the directory table %s was changed after this transaction began', its_relation),
            HINT = 'Run the transaction again.';
    ELSIF (SELECT c.relhassubclass FROM pg_class c WHERE c.oid = its_relation) THEN
        RAISE EXCEPTION USING ERRCODE = 'feature_not_supported',
            MESSAGE = format('the directory table %s has, or had, children', its_relation),
            HINT = 'Write it at READ COMMITTED: here nobody sees whose the newest ones are. Once it has none, ANALYZE it.';
    END IF;
END $$;

-- The statement that publishes the keys that `event` has touched: INSERT, UPDATE, DELETE (of the transition tables new_rows
-- and old_rows), ALL, or KEYS, which are its argument. Built anew for each statement, so a column that was added yesterday
-- is in today's messages; and each time the owners are looked at, and whether the columns to leave out are still called so.
-- The names of the messages are counted: of two values of one name JSON has the last, in what is published and in what
-- tells a change. The join asks for the key's columns, for the sake of the index, and for its text: 1.0 and 1.00 are equal,
-- and two keys.
--
-- Of a key that the writer has touched, the active row is one of its own: age(xmin) <= 0. Under REPEATABLE READ its
-- snapshot may show another one, which somebody has deactivated since; that would be published as a second message of
-- the key, and could be the last one.
--
-- Transition tables do not compute virtual generated columns, so their expressions stand in the place of them.
CREATE FUNCTION sidings.directory_statement(d sidings.directory, event text) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    fields   text;   -- of the table
    computed text;   -- of a transition table
    active   text := 'true';
    columns  text;
    named    text;
    either   text;
    same     text;
    key      text;
    stored   text;
    before   text;
    after    text;
    touched  text;
    alike    boolean;
    gone     text := (SELECT l FROM unnest(d.left_out) l WHERE NOT EXISTS (
        SELECT FROM pg_attribute a WHERE a.attrelid = d.relation AND a.attname = l AND a.attnum > 0 AND NOT a.attisdropped) LIMIT 1);
BEGIN
    PERFORM sidings.check_directory_owners(d);
    IF gone IS NOT NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'undefined_column',
            MESSAGE = format('left_out: %s has no column %L any more', d.relation, gone),
            HINT = 'It was renamed, perhaps: what nobody was to see would be published. Call sidings.directory_table for it again, with '
                   'the names that the columns to leave out have now.';
    END IF;
    SELECT string_agg(format('r.%I AS %I', a.attname, n.name), ', ' ORDER BY a.attnum) FILTER (WHERE a.attname <> ALL (d.left_out)),
           string_agg(format('%s AS %I', s.source, n.name), ', ' ORDER BY a.attnum) FILTER (WHERE a.attname <> ALL (d.left_out)),
           coalesce(min(s.source) FILTER (WHERE a.attname = d.active), 'true'),
           count(DISTINCT n.name) FILTER (WHERE a.attname <> ALL (d.left_out)) < count(*) FILTER (WHERE a.attname <> ALL (d.left_out))
    INTO fields, computed, active, alike
    FROM pg_attribute a
    LEFT JOIN pg_attrdef x ON x.adrelid = a.attrelid AND x.adnum = a.attnum,
         LATERAL (SELECT CASE WHEN d.camel_case THEN sidings.camel_case(a.attname) ELSE a.attname END) n (name),
         LATERAL (SELECT CASE WHEN a.attgenerated = 'v' THEN format('(%s)', pg_get_expr(x.adbin, x.adrelid))
                              ELSE format('r.%I', a.attname) END) s (source)
    WHERE a.attrelid = d.relation AND a.attnum > 0 AND NOT a.attisdropped;
    IF alike THEN
        RAISE EXCEPTION USING ERRCODE = 'duplicate_column',
            MESSAGE = format('camel_case: two columns of %s would get the same name', d.relation),
            HINT = 'One of them came later: rename it, or call sidings.directory_table again, with one of them in left_out.';
    END IF;
    SELECT string_agg(format('r.%I', k), ', ' ORDER BY n), string_agg(format('r.%I AS k%s', k, n), ', ' ORDER BY n),
           string_agg(format('coalesce(o.k%1$s, n.k%1$s) AS k%1$s', n), ', '), string_agg(format('r.%I = c.k%s', k, n), ' AND ')
    INTO columns, named, either, same
    FROM unnest(d.key) WITH ORDINALITY u (k, n);
    key := format('convert_to(%s, ''UTF8'')', CASE WHEN cardinality(d.key) = 1 THEN format('to_jsonb(%s) #>> ''{}''', columns)
                                                   ELSE format('jsonb_build_array(%s)::text', columns) END);
    -- Both spellings of the flag, so that a partial index with either one serves.
    stored := format('SELECT %s, %s AS key, (SELECT to_jsonb(v.*) FROM (SELECT %s) v) AS value FROM %s r WHERE %s', named, key,
                     fields, d.relation, CASE WHEN d.active IS NULL THEN 'true' ELSE format('r.%1$I AND r.%1$I IS TRUE', d.active) END);
    before := format('SELECT %s, %s AS key, (SELECT to_jsonb(v.*) FROM (SELECT %s) v) AS value FROM old_rows r WHERE %s',
                     named, key, computed, active);
    after := format('SELECT %s, %s AS key, (SELECT to_jsonb(v.*) FROM (SELECT %s) v) AS value FROM new_rows r WHERE %s',
                    named, key, computed, active);
    IF event = 'KEYS' THEN
        RETURN format('INSERT INTO sidings.outbox (slot, topic, key, value) '
                      'SELECT sidings.outbox_slot(%1$L, c.key), %1$L, c.key, convert_to(t.value::text, ''UTF8'') '
                      'FROM unnest($1) c (key) LEFT JOIN (%2$s) t USING (key)', d.topic, stored);
    ELSIF event = 'ALL' THEN
        RETURN format('INSERT INTO sidings.outbox (slot, topic, key, value) '
                      'SELECT sidings.outbox_slot(%1$L, c.key), %1$L, c.key, convert_to(c.value::text, ''UTF8'') '
                      'FROM (%2$s) c', d.topic, stored);
    END IF;
    touched := CASE event
        WHEN 'INSERT' THEN after
        WHEN 'DELETE' THEN before
        WHEN 'UPDATE' THEN format('SELECT %s, key FROM (%s) o FULL JOIN (%s) n USING (key) WHERE o.value IS DISTINCT FROM n.value',
                                  either, before, after) END;
    RETURN format('INSERT INTO sidings.outbox (slot, topic, key, value) '
                  'SELECT sidings.outbox_slot(%1$L, c.key), %1$L, c.key, convert_to(t.value::text, ''UTF8'') '
                  'FROM (%2$s) c LEFT JOIN LATERAL (%3$s AND %4$s AND %5$s = c.key AND age(r.xmin) <= 0) t ON true',
                  d.topic, touched, stored, same, key);
END $$;

-- The triggers that publish. With the rights of the schema's owner, so that who maintains the table needs none here; what
-- it does is in sidings.directory, not in arguments that any trigger could bring. The settings: a row is the same message
-- whoever writes it, and a policy of row-level security is an error, not a row that seems to be gone. A snapshot that is
-- too old is refused.
CREATE FUNCTION sidings.directory_publish() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET row_security = off
SET TimeZone = 'UTC' SET DateStyle = 'ISO' SET IntervalStyle = 'iso_8601' SET bytea_output = 'hex' SET extra_float_digits = 1
AS $$
DECLARE
    d sidings.directory;
BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        PERFORM sidings.check_directory_snapshot(TG_RELID, TG_NAME);
    END IF;
    SELECT * INTO d FROM sidings.directory x WHERE x.relation = TG_RELID;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('%s has the triggers of a directory table and is none', TG_RELID::regclass),
            HINT = 'Call sidings.directory_table for it, or sidings.directory_remove.';
    END IF;
    EXECUTE sidings.directory_statement(d, TG_OP);
    RETURN NULL;
END $$;

-- The triggers that refuse. Arguments: what, the columns of the key, the column of the flag ('': none).
CREATE FUNCTION sidings.directory_refuse() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    key_columns constant text[] := TG_ARGV[1];
    flag        constant text := nullif(TG_ARGV[2], '');
    row_key     constant text := CASE WHEN TG_LEVEL = 'ROW' THEN
                    (SELECT string_agg(format('%s = %L', k, to_jsonb(OLD) ->> k), ', ' ORDER BY n)
                     FROM unnest(key_columns) WITH ORDINALITY u (k, n)) END;
    problem     text;
    remedy      text;
BEGIN
    CASE TG_ARGV[0]
        WHEN 'key' THEN
            problem := format('%s of a row of %s cannot be changed: it is the key of its messages', row_key, TG_TABLE_NAME);
            remedy := CASE WHEN flag IS NULL THEN 'Delete the row, and insert another one.'
                           ELSE format('Make the row inactive (%s = false), and insert another one.', flag) END;
        WHEN 'active' THEN
            problem := format('an active row of %s cannot be deleted: %s', TG_TABLE_NAME, row_key);
            remedy := format('Make it inactive first (%s = false).', flag);
        WHEN 'truncate' THEN
            problem := format('%s cannot be truncated: services would keep its rows', TG_TABLE_NAME);
            remedy := CASE WHEN flag IS NULL THEN 'Use DELETE.'
                           ELSE format('Make all rows inactive (%s = false), then use DELETE.', flag) END;
    END CASE;
    RAISE EXCEPTION USING ERRCODE = 'restrict_violation', MESSAGE = problem, HINT = remedy,
        SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME;
END $$;

-- The table of that name, with all who write to it locked out until the caller's transaction ends: what is read then, in
-- a statement of its own, is what they have committed.
CREATE FUNCTION sidings.lock_directory(name text) RETURNS regclass
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

-- Publish every active row. Returns how many messages that makes.
--
-- For a topic that has lost messages, and after changes that fired no trigger (session_replication_role, pg_restore). Keys
-- that went away without a trigger stay in the topic: sidings.publish(topic, key, NULL) takes one out.
CREATE FUNCTION sidings.directory_republish(name text) RETURNS bigint
LANGUAGE plpgsql SET lock_timeout = '5s' SET row_security = off
SET TimeZone = 'UTC' SET DateStyle = 'ISO' SET IntervalStyle = 'iso_8601' SET bytea_output = 'hex' SET extra_float_digits = 1
AS $$
DECLARE
    its_relation constant regclass := sidings.lock_directory(name);
    d         sidings.directory;
    published bigint;
BEGIN
    SELECT * INTO d FROM sidings.directory x WHERE x.relation = its_relation;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = format('name: %s is no directory table', its_relation),
            HINT = 'Call sidings.directory_table for it first.';
    END IF;
    EXECUTE sidings.directory_statement(d, 'ALL');
    GET DIAGNOSTICS published = ROW_COUNT;
    RETURN published;
END $$;

-- Publish what the table of a topic says of these keys, also where it is that they are gone. Returns how many messages that
-- makes; 0 where the topic is no table's. For a relay whose messages may have come late, behind newer ones,
-- and whose search_path may be anything: so it has its own. (directory_republish() has none, since it is given a name.)
CREATE FUNCTION sidings.directory_repeat(topic text, keys bytea[]) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' SET row_security = off
SET TimeZone = 'UTC' SET DateStyle = 'ISO' SET IntervalStyle = 'iso_8601' SET bytea_output = 'hex' SET extra_float_digits = 1
AS $$
DECLARE
    d         sidings.directory;
    published bigint;
BEGIN
    PERFORM sidings.lock_directory(x.relation::text)
    FROM sidings.directory x JOIN pg_class c ON c.oid = x.relation WHERE x.topic = directory_repeat.topic;
    SELECT x.* INTO d FROM sidings.directory x JOIN pg_class c ON c.oid = x.relation WHERE x.topic = directory_repeat.topic;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    EXECUTE sidings.directory_statement(d, 'KEYS') USING keys;
    GET DIAGNOSTICS published = ROW_COUNT;
    RETURN published;
END $$;

-- The table is an ordinary one again. What is in the topic stays there.
CREATE FUNCTION sidings.directory_remove(name text) RETURNS void
LANGUAGE plpgsql SET lock_timeout = '5s' AS $$
DECLARE
    its_relation constant regclass := sidings.lock_directory(name);
    its_trigger  name;
BEGIN
    FOR its_trigger IN
        SELECT t.tgname FROM pg_trigger t
        WHERE t.tgrelid = its_relation AND t.tgfoid IN ('sidings.directory_publish'::regproc, 'sidings.directory_refuse'::regproc)
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', its_trigger, its_relation);
    END LOOP;
    DELETE FROM sidings.directory x WHERE x.relation = its_relation;
END $$;

-- From here on each change of the table is published to the topic, and what is there now is published at once.
--
--   name        of the table
--   topic       compacted; no other table's
--   key         columns, never null, with a unique index: the key of the messages is their text, of several a JSON array
--   active      boolean column: a row in force. Making it false publishes a tombstone; an active row cannot be deleted.
--               null: all rows are, and deleting one publishes a tombstone
--   left_out    columns that the messages do not have
--   camel_case  terminal_id is terminalId in the messages
--   publish     false: not what is there now, because the topic has it already
--
-- Returns how many rows were published. Again with the same arguments it does nothing; other ones replace the former.
-- What cannot be is refused with SQLSTATE 22023 and a hint. Until the caller's transaction ends nobody else can write to
-- the table.
CREATE FUNCTION sidings.directory_table(
    name       text,
    topic      text,
    key        text[],
    active     text DEFAULT NULL,
    left_out   text[] DEFAULT '{}',
    camel_case boolean DEFAULT false,
    publish    boolean DEFAULT true
) RETURNS bigint
LANGUAGE plpgsql SET lock_timeout = '5s' AS $$
DECLARE
    its_relation constant regclass := sidings.lock_directory(name);
    prefix  constant text := rtrim('sidings.', '.');
    wanted  constant sidings.directory := ROW (its_relation, topic, key, active, left_out, camel_case, clock_timestamp());
    former  sidings.directory;
    event   text;
    rows    text;
BEGIN
    DELETE FROM sidings.directory x WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = x.relation);   -- dropped tables
    PERFORM sidings.check_directory(wanted);
    SELECT * INTO former FROM sidings.directory x WHERE x.relation = its_relation;
    IF (former.topic, former.key, former.active, former.left_out, former.camel_case)
       IS NOT DISTINCT FROM (topic, key, active, left_out, camel_case)
       AND (SELECT count(*) FROM pg_trigger t
            WHERE t.tgrelid = its_relation AND t.tgenabled = 'O'
              AND t.tgfoid IN ('sidings.directory_publish'::regproc, 'sidings.directory_refuse'::regproc)) = 5 THEN
        RETURN 0;
    ELSIF former.topic = topic AND (former.key, former.active) IS DISTINCT FROM (key, active) THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('topic: %s has messages of %s by another key, or with another flag', topic, its_relation),
            HINT = 'Give a new topic: the keys of before would stay in this one.';
    END IF;
    PERFORM sidings.directory_remove(name);
    INSERT INTO sidings.directory SELECT wanted.*;
    FOR event, rows IN
        VALUES ('INSERT', 'NEW TABLE AS new_rows'), ('UPDATE', 'OLD TABLE AS old_rows NEW TABLE AS new_rows'),
               ('DELETE', 'OLD TABLE AS old_rows')
    LOOP
        CONTINUE WHEN event = 'DELETE' AND active IS NOT NULL;   -- such a row is inactive: its tombstone has been published
        EXECUTE format('CREATE TRIGGER %I AFTER %s ON %s REFERENCING %s FOR EACH STATEMENT '
                       'EXECUTE FUNCTION sidings.directory_publish()',
                       prefix || '_publish_' || lower(event), event, its_relation, rows);
    END LOOP;
    -- After, because triggers of the user's may yet change a row before it is written.
    EXECUTE format('CREATE TRIGGER %I AFTER UPDATE ON %s FOR EACH ROW WHEN (%s) EXECUTE FUNCTION sidings.directory_refuse(%L, %L, %L)',
                   prefix || '_keep_key', its_relation,
                   (SELECT string_agg(format('OLD.%1$I::text IS DISTINCT FROM NEW.%1$I::text', k), ' OR ') FROM unnest(key) k),
                   'key', key, coalesce(active, ''));
    IF active IS NOT NULL THEN
        EXECUTE format('CREATE TRIGGER %I BEFORE DELETE ON %s FOR EACH ROW WHEN (OLD.%I) '
                       'EXECUTE FUNCTION sidings.directory_refuse(%L, %L, %L)',
                       prefix || '_keep_active', its_relation, active, 'active', key, active);
    END IF;
    EXECUTE format('CREATE TRIGGER %I BEFORE TRUNCATE ON %s FOR EACH STATEMENT '
                   'EXECUTE FUNCTION sidings.directory_refuse(%L, %L, %L)',
                   prefix || '_keep_rows', its_relation, 'truncate', key, coalesce(active, ''));
    IF publish THEN
        RETURN sidings.directory_republish(name);
    END IF;
    RETURN 0;
END $$;
