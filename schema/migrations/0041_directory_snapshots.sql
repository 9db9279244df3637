-- A transaction that sees a directory table as it was before somebody changed it publishes nothing by that.
-- runs with 0019

-- As in 0012, but for writers at REPEATABLE READ or SERIALIZABLE, who read here what stood in the catalogs when they began: a former topic,
-- columns that are left out by now, and none that were added. The triggers that fire are those of now, and a set-up makes new ones;
-- functions that are asked for a trigger, or a column, know what is there now as well. New columns have new numbers.
CREATE OR REPLACE FUNCTION sidings.directory_publish() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET row_security = off
SET TimeZone = 'UTC' SET DateStyle = 'ISO' SET IntervalStyle = 'iso_8601' SET bytea_output = 'hex' SET extra_float_digits = 1
AS $$
DECLARE
    d sidings.directory;
BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') AND (
           pg_get_triggerdef((SELECT t.oid FROM pg_trigger t WHERE t.tgrelid = TG_RELID AND t.tgname = TG_NAME)) IS NULL
           OR EXISTS (SELECT FROM generate_series(1, (SELECT max(a.attnum) + 1 FROM pg_attribute a WHERE a.attrelid = TG_RELID)) n
                      LEFT JOIN pg_attribute a ON a.attrelid = TG_RELID AND a.attnum = n AND NOT a.attisdropped
                      WHERE (has_column_privilege(TG_RELID, n::smallint, 'SELECT') IS NULL) <> (a.attnum IS NULL))) THEN
        RAISE EXCEPTION USING ERRCODE = 'serialization_failure',
            MESSAGE = format('could not serialize access: the directory table %s was changed after this transaction began', TG_RELID::regclass),
            HINT = 'Run the transaction again.';
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
