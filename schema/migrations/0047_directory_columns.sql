-- No column of a directory table is published under another name: neither one that is left out, when it is renamed, nor, in camel case, one that
-- comes later and gets the name of another one.
-- runs with 0019

-- What had been renamed or dropped before is published already, or is no more: its name goes.
UPDATE sidings.directory d SET left_out = ARRAY(
    SELECT l FROM unnest(d.left_out) WITH ORDINALITY u (l, n)
    WHERE EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = d.relation AND a.attname = l AND a.attnum > 0 AND NOT a.attisdropped)
    ORDER BY n);

-- As in 0029, and each name of a column to leave out has to be one, as those of the key and the flag; and the names of the messages are
-- counted: of two values of one name JSON has the last, in what is published and in what tells a change.
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

-- Better here, with nothing changed, than at the next edit.
SELECT sidings.directory_statement(x, 'ALL') FROM sidings.directory x JOIN pg_class c ON c.oid = x.relation;
