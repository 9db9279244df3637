-- runs with 0051
--
-- Which rows of a directory table are the writer's own. What was there is written out once more; what has changed stands
-- above it.

-- Whether the caller's transaction, or a subtransaction of it, has written a row that it sees, with this xmin: what others
-- have written has ended. Of an id's 64 bits xmin has 32; it counts on from the transaction's own, which is the lowest of its
-- ids. An id that nobody has drawn yet, an error here, means that the row is an old one.
CREATE FUNCTION sidings.written_here(its_xmin xid) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
DECLARE
    own constant bigint := pg_current_xact_id()::text::bigint;
BEGIN
    RETURN pg_xact_status((own + ((its_xmin::text::bigint - own) & 4294967295))::text::xid8) = 'in progress';
EXCEPTION WHEN invalid_parameter_value THEN
    RETURN false;
END $$;

-- As before, but age(xmin) <= 0 does not make a row the writer's own. Others have it as well: those written more than 2^31
-- transactions ago, since a frozen row keeps its xmin; and where the writer got its id by a lock, before its snapshot was
-- taken, those written in between. If somebody had deactivated one since, it was published, and could be the last one of its
-- key. So it is asked whose a row is: of those of the key alone, as it takes a few microseconds, and a join may read all of
-- the table.
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
                  'FROM (%2$s) c LEFT JOIN LATERAL (%3$s AND %4$s AND age(r.xmin) <= 0 AND CASE WHEN %5$s = c.key THEN '
                  'r.xmin = pg_current_xact_id()::xid OR sidings.written_here(r.xmin) END) t ON true',
                  d.topic, touched, stored, same, key);
END $$;
