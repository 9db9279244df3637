-- A transaction that sees a directory table as it was before somebody changed it publishes nothing by that.
-- runs with 0019

-- Raises where a writer at REPEATABLE READ or SERIALIZABLE may not see what the table is now: its snapshot has the former topic, columns that are
-- left out by now, and none that were added; and the former owners of what is read with the rights of the schema's owner.
--
-- The trigger that fires is that of now, and a set-up makes new ones; functions that are asked for a trigger, or a column, know what is
-- there now as well. A row of the catalogs that was replaced since has an xmax that the snapshot does not see. Children that are new leave
-- no trace once a table has had one.
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

-- As in 0012, and a snapshot that is too old is refused.
CREATE OR REPLACE FUNCTION sidings.directory_publish() RETURNS trigger
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
