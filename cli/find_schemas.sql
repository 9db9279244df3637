-- The schemas of this database that are Sidings', for somebody who has named another one.
SELECT t.schemaname FROM pg_tables t
WHERE t.tablename = 'job_history' AND EXISTS (SELECT FROM pg_tables m WHERE m.schemaname = t.schemaname AND m.tablename = 'migration')
ORDER BY t.schemaname
