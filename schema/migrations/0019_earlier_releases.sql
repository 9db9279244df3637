-- A release can be rolled back, and an old instance that dies while the instances are rolled starts again, although the schema has been
-- migrated by a later one: where each migration that it does not know says that it may.
--   runs_with  the last migration that a release must know to run with this one; null: this one. A file says it in a line of its head,
--              `-- runs with 0019`, after its tests have run with that release's code.
-- What runs while it is migrated goes on in any case, so only what a *start* needs stands in the way: a statement whose arguments or
-- columns have changed, say. A column that is new and has a default, an index, a function that is replaced by one that does more, do not.
ALTER TABLE sidings.migration ADD COLUMN runs_with integer CONSTRAINT migration_runs_with_check CHECK (runs_with < version);
