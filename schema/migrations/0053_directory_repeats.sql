-- runs with 0051
--
-- What a directory table says of keys in doubt is read with its writers locked out. Each function is written out once more;
-- what has changed stands above it.

-- As before, but for KEYS the rows are looked for first, in a query of its own, and only what is found is made JSON: all
-- active rows were, under the lock, for each ten thousand keys and for a single one.
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
        RETURN format('WITH found AS MATERIALIZED (SELECT t.key, t.value FROM unnest($1) c (key) JOIN (%2$s) t USING (key)) '
                      'INSERT INTO sidings.outbox (slot, topic, key, value) '
                      'SELECT sidings.outbox_slot(%1$L, c.key), %1$L, c.key, convert_to(t.value::text, ''UTF8'') '
                      'FROM unnest($1) c (key) LEFT JOIN found t USING (key)', d.topic, stored);
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

-- As before, but the table is read in the order in which it is stored: a relay's connection has sequential scans off, and
-- read all of it by way of an index.
CREATE OR REPLACE FUNCTION sidings.directory_repeat(topic text, keys bytea[]) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '5s' SET row_security = off SET enable_seqscan = on
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
