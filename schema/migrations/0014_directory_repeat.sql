-- What a relay that was paused past its lease has written late is published again (docs/decisions/0022).

-- The statement that publishes the keys that `event` has touched: INSERT, UPDATE, DELETE (of the transition tables new_rows
-- and old_rows), ALL, or KEYS, which are its argument. Built anew for each statement, so a column that was added yesterday is in today's messages.
-- The join asks for the key's columns, for the sake of the index, and for its text: 1.0 and 1.00 are equal, and two keys.
CREATE OR REPLACE FUNCTION sidings.directory_statement(d sidings.directory, event text) RETURNS text
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
    IF event = 'KEYS' THEN
        RETURN format('INSERT INTO sidings.outbox (slot, topic, key, value) '
                      'SELECT sidings.outbox_slot(%1$L, c.key), %1$L, c.key, convert_to(t.value::text, ''UTF8'') '
                      'FROM unnest($1) c (key) LEFT JOIN (%2$s) t USING (key)', d.topic, format(rows, d.relation));
    END IF;
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

-- Publish what the table of a topic says of these keys, also where it is that they are gone. Returns how many messages that
-- makes; 0 where the topic is no table's. For a relay whose messages may have come late, behind newer ones.
CREATE FUNCTION sidings.directory_repeat(topic text, keys bytea[]) RETURNS bigint
LANGUAGE plpgsql SET lock_timeout = '5s' SET row_security = off
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
