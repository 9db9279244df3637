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

-- terminal_id becomes terminalId, as Kafka Connect's ChangeCase (LOWER_UNDERSCORE to LOWER_CAMEL) makes it.
CREATE FUNCTION sidings.camel_case(name text) RETURNS text
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
RETURN (SELECT string_agg(CASE WHEN n = 1 THEN lower(word) ELSE upper(left(word, 1)) || lower(substr(word, 2)) END, '' ORDER BY n)
        FROM unnest(string_to_array(name, '_')) WITH ORDINALITY w (word, n));

-- The statement that publishes the keys that `event` has touched: INSERT, UPDATE, DELETE (of the transition tables new_rows
-- and old_rows), or ALL. Built anew for each statement, so a column that was added yesterday is in today's messages.
-- The join asks for the key's columns, for the sake of the index, and for its text: 1.0 and 1.00 are equal, and two keys.
CREATE FUNCTION sidings.directory_statement(d sidings.directory, event text) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    fields  text := (SELECT string_agg(format('r.%I AS %I', a.attname, CASE WHEN d.camel_case THEN sidings.camel_case(a.attname)
                                                                            ELSE a.attname END), ', ' ORDER BY a.attnum)
                     FROM pg_attribute a
                     WHERE a.attrelid = d.relation AND a.attnum > 0 AND NOT a.attisdropped AND a.attname <> ALL (d.left_out));
    columns text;
    named   text;
    either  text;
    same    text;
    key     text;
    rows    text;
    touched text;
BEGIN
    SELECT string_agg(format('r.%I', k), ', ' ORDER BY n), string_agg(format('r.%I AS k%s', k, n), ', ' ORDER BY n),
           string_agg(format('coalesce(o.k%1$s, n.k%1$s) AS k%1$s', n), ', '), string_agg(format('r.%I = c.k%s', k, n), ' AND ')
    INTO columns, named, either, same
    FROM unnest(d.key) WITH ORDINALITY u (k, n);
    key := format('convert_to(%s, ''UTF8'')', CASE WHEN cardinality(d.key) = 1 THEN format('to_jsonb(%s) #>> ''{}''', columns)
                                                   ELSE format('jsonb_build_array(%s)::text', columns) END);
    -- Both spellings, so that a partial index with either one serves.
    rows := format('SELECT %s, %s AS key, (SELECT to_jsonb(v.*) FROM (SELECT %s) v) AS value FROM %%s r WHERE %s', named, key,
                   fields, CASE WHEN d.active IS NULL THEN 'true' ELSE format('r.%1$I AND r.%1$I IS TRUE', d.active) END);
    touched := CASE event
        WHEN 'INSERT' THEN format(rows, 'new_rows')
        WHEN 'DELETE' THEN format(rows, 'old_rows')
        WHEN 'UPDATE' THEN format('SELECT %s, key FROM (%s) o FULL JOIN (%s) n USING (key) WHERE o.value IS DISTINCT FROM n.value',
                                  either, format(rows, 'old_rows'), format(rows, 'new_rows'))
        WHEN 'ALL' THEN format(rows, d.relation) END;
    RETURN format('INSERT INTO sidings.outbox (slot, topic, key, value) '
                  'SELECT sidings.outbox_slot(%1$L, c.key), %1$L, c.key, convert_to(t.value::text, ''UTF8'') '
                  'FROM (%2$s) c LEFT JOIN LATERAL (%3$s AND %4$s AND %5$s = c.key) t ON true',
                  d.topic, touched, format(rows, d.relation), same, key);
END $$;

-- The triggers that publish. With the rights of the schema's owner, so that who maintains the table needs none here; what it
-- does is in sidings.directory, not in arguments that any trigger could bring. The settings: a row is the same message
-- whoever writes it, and a policy of row-level security is an error, not a row that seems to be gone.
CREATE FUNCTION sidings.directory_publish() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET row_security = off
SET TimeZone = 'UTC' SET DateStyle = 'ISO' SET IntervalStyle = 'iso_8601' SET bytea_output = 'hex' SET extra_float_digits = 1
AS $$
DECLARE
    d sidings.directory;
BEGIN
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
        ELSE RETURN;
    END CASE;
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = problem, HINT = remedy;
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
            HINT = 'Call it outside of a transaction: what it read before it waited for the lock would be out of date.';
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
-- Returns how many rows were published. Again with the same arguments it does nothing; other ones replace the former. What
-- cannot be is refused with SQLSTATE 22023 and a hint. Until the caller's transaction ends nobody else can write to the table.
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
