-- Which database this is, also among copies of one: a copy has the rows of its original, so that none of them tells. It stays the same
-- over a promotion.
SELECT concat_ws('/', (SELECT system_identifier FROM pg_control_system()), d.oid, 'sidings.job_history'::regclass::oid)
FROM pg_database d WHERE d.datname = current_database()
