-- Nobody's code but the owner's runs with the rights of the schema's owner; times that no datetime can be are refused.
-- runs with 0019

-- Raises unless the table, the types of its columns, and the functions that come with them belong to roles that may do what the owner of the
-- schema may. Rows are read, and made JSON, with his rights. What could run with them: the cast of a type to json; and what an index, a
-- constraint or statistics of the table ask of constants, which Postgres works out when it plans a query.
--
-- By owners of tables and types, and not only by what there is: it may be made just before the statement runs that this is asked for. The
-- owner of the table stays, as the writer has locked it. Not asked for is the owner of a domain: only the type that it is made of counts.
CREATE FUNCTION sidings.check_directory_owners(d sidings.directory) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    its_owner constant oid := (SELECT p.proowner FROM pg_proc p WHERE p.oid = 'sidings.directory_publish'::regproc);
    other     record;
BEGIN
    WITH RECURSIVE of_columns (attribute, oid) AS (
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
        SELECT y.attribute, t.oid, t.typowner FROM of_columns y JOIN pg_type t ON t.oid = y.oid
        WHERE t.typtype <> 'd' AND t.typcategory <> 'A'
    ), parts (classid, objid, what) AS (
        SELECT 'pg_class'::regclass, i.indexrelid, 'an index' FROM pg_index i WHERE i.indrelid = d.relation
        UNION ALL
        SELECT 'pg_statistic_ext'::regclass, x.oid, 'statistics' FROM pg_statistic_ext x WHERE x.stxrelid = d.relation
        UNION ALL    -- worked out where the writer has set constraint_exclusion
        SELECT 'pg_constraint'::regclass, c.oid, 'a constraint' FROM pg_constraint c WHERE c.conrelid = d.relation
    ), functions (oid, what) AS (
        SELECT c.castfunc, format('the column %s', t.attribute)
        FROM types t JOIN pg_cast c ON c.castsource = t.oid AND c.casttarget = 'json'::regtype
        UNION ALL
        SELECT coalesce(o.oprcode, x.refobjid), p.what
        FROM parts p JOIN pg_depend x ON x.classid = p.classid AND x.objid = p.objid
        LEFT JOIN pg_operator o ON o.oid = x.refobjid AND x.refclassid = 'pg_operator'::regclass
        WHERE x.refclassid IN ('pg_proc'::regclass, 'pg_operator'::regclass)
    ), owned (owner, kind, name, what) AS (
        SELECT c.relowner, 'TABLE', d.relation::text, NULL FROM pg_class c WHERE c.oid = d.relation
        UNION ALL
        SELECT t.typowner, 'TYPE', t.oid::regtype::text, format('the column %s', t.attribute) FROM types t
        UNION ALL
        SELECT p.proowner, 'FUNCTION', p.oid::regprocedure::text, f.what FROM functions f JOIN pg_proc p ON p.oid = f.oid
    )
    SELECT o.* INTO other FROM owned o WHERE NOT pg_has_role(o.owner, its_owner, 'MEMBER') LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('name: the %s %s%s belongs to %s, whose code would run with the rights of %s, who owns the schema %s',
                             lower(other.kind), other.name, ', of ' || other.what || format(' of %s,', d.relation),
                             pg_get_userbyid(other.owner), pg_get_userbyid(its_owner), rtrim('sidings.', '.')),
            HINT = format('ALTER %s %s OWNER TO %I%s', other.kind, other.name, pg_get_userbyid(its_owner), CASE other.kind
                          WHEN 'TABLE' THEN '. To edit its rows, INSERT, UPDATE and DELETE are enough.'
                          WHEN 'TYPE' THEN ', or leave the column out (left_out).' ELSE ', or drop what uses it.' END);
    END IF;
END $$;

-- As in 0012, and who owns them is looked at.
CREATE OR REPLACE FUNCTION sidings.check_directory(d sidings.directory) RETURNS void
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

-- As in 0023, and who owns them is looked at, each time.
CREATE OR REPLACE FUNCTION sidings.directory_statement(d sidings.directory, event text) RETURNS text
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
BEGIN
    PERFORM sidings.check_directory_owners(d);
    SELECT string_agg(format('r.%I AS %I', a.attname, n.name), ', ' ORDER BY a.attnum) FILTER (WHERE a.attname <> ALL (d.left_out)),
           string_agg(format('%s AS %I', s.source, n.name), ', ' ORDER BY a.attnum) FILTER (WHERE a.attname <> ALL (d.left_out)),
           coalesce(min(s.source) FILTER (WHERE a.attname = d.active), 'true')
    INTO fields, computed, active
    FROM pg_attribute a
    LEFT JOIN pg_attrdef x ON x.adrelid = a.attrelid AND x.adnum = a.attnum,
         LATERAL (SELECT CASE WHEN d.camel_case THEN sidings.camel_case(a.attname) ELSE a.attname END) n (name),
         LATERAL (SELECT CASE WHEN a.attgenerated = 'v' THEN format('(%s)', pg_get_expr(x.adbin, x.adrelid))
                              ELSE format('r.%I', a.attname) END) s (source)
    WHERE a.attrelid = d.relation AND a.attnum > 0 AND NOT a.attisdropped;
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

-- For relays, whose search_path anything may be.
ALTER FUNCTION sidings.directory_repeat(text, bytea[]) SET search_path = pg_catalog, pg_temp;

-- As in 0010, but for the times that it refuses.
CREATE OR REPLACE FUNCTION sidings.enqueue(
    type       text,
    payload    json,
    origin     text,
    "group"    text DEFAULT NULL,
    delay      interval DEFAULT NULL,
    run_at     timestamptz DEFAULT NULL,
    priority   integer DEFAULT 0,
    headers    jsonb DEFAULT NULL,
    unique_key text DEFAULT NULL,
    policy     text DEFAULT 'serial'
) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    problem text;
    remedy  text;
    due     timestamptz;
    number  integer := array_position('{serial,latest,parallel}'::text[], policy) - 1;
    new_id  bigint;
BEGIN
    origin := sidings.place(origin, "group");
    CASE
        WHEN type IS NULL OR type = '' THEN
            problem := 'the job has no type';
            remedy := 'Give the name of its handler, e.g. ''send_eta''.';
        WHEN origin IS NULL OR origin = '' THEN
            problem := format('the job %L needs an origin', type);
            remedy := 'Give origin => ''topic/partition'', the Kafka partition of the entity''s key.';
        WHEN "group" = '' THEN
            problem := format('the group of the job %L is empty', type);
            remedy := 'Give the key of its entity, or NULL for a job that stands alone.';
        WHEN strpos(concat(type, origin, "group", unique_key), chr(31)) > 0 THEN
            problem := format('type, origin, group or unique_key of the job %L holds a control character that cannot be stored (U+001F)', type);
            remedy := 'Remove it.';
        WHEN octet_length(type) > 1000 OR octet_length(origin) > 1000 OR octet_length("group") > 1000
             OR octet_length(unique_key) > 1000 THEN
            problem := format('type, origin, group or unique_key of the job %L is longer than 1000 bytes', left(type, 40));
            remedy := 'Use a shorter name, e.g. a hash of it: an index entry has to fit.';
        WHEN delay IS NOT NULL AND run_at IS NOT NULL THEN
            problem := format('the job %L has both delay and run_at', type);
            remedy := 'Give one of them.';
        WHEN delay < interval '0' OR delay > interval '366 days' THEN
            problem := format('the delay of the job %L is %s', type, delay);
            remedy := 'Give between 0 and 366 days, or use run_at.';
        WHEN run_at NOT BETWEEN '0001-01-01 00:00:00+00' AND '9999-12-31 23:59:59.999999+00' THEN
            problem := format('run_at: the job %L would become due at %s', type, run_at);
            remedy := 'Give a time from the year 1 to the year 9999 (in UTC): Python has no others.';
        WHEN priority IS NULL OR priority NOT BETWEEN -100 AND 100 THEN
            problem := format('the priority of the job %L is %s', type, coalesce(priority::text, 'NULL'));
            remedy := 'Give a whole number from -100 to 100.';
        WHEN jsonb_typeof(headers) <> 'object' OR jsonb_path_exists(headers, '$.* ? (@.type() != "string")') THEN
            problem := format('the headers of the job %L are not an object of texts', type);
            remedy := 'Give e.g. jsonb_build_object(''correlation_id'', …).';
        WHEN number IS NULL THEN
            problem := format('the policy of the job %L is %L', type, policy);
            remedy := 'Give ''serial'', ''latest'' or ''parallel'', as its type is declared.';
        WHEN number = 1 AND "group" IS NULL THEN
            problem := format('the job %L has the policy ''latest'' and no group', type);
            remedy := 'Give the key of its entity: the newest job of a group runs.';
        WHEN unique_key = '' THEN
            problem := format('the unique_key of the job %L is empty', type);
            remedy := 'Give what must not be there twice, or NULL.';
        WHEN unique_key IS NOT NULL THEN
            due := coalesce(run_at, clock_timestamp() + nullif(delay, interval '0'));
            SELECT u.id INTO new_id
            FROM sidings.insert_unique(type, origin, "group", priority, due, headers, payload, number, unique_key) u;
            RETURN new_id;
        ELSE
            due := coalesce(run_at, clock_timestamp() + nullif(delay, interval '0'));
            INSERT INTO sidings.job (type, origin, "group", priority, run_at, headers, payload, policy, position)
            VALUES (enqueue.type, enqueue.origin, enqueue."group", enqueue.priority, due, enqueue.headers, enqueue.payload, number,
                    CASE WHEN due IS NULL AND pg_current_xact_id() IS NOT NULL THEN nextval('sidings.job_position') END)
            RETURNING job.id INTO new_id;
            RETURN new_id;
    END CASE;
    RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = problem, HINT = remedy;
END $$;

-- Tables that are directories already: better here, with nothing changed, than at the next edit.
SELECT sidings.check_directory_owners(x) FROM sidings.directory x JOIN pg_class c ON c.oid = x.relation;
