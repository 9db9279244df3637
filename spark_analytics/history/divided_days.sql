-- Those of the days $1 that have a partition by now, whatever the transaction's snapshot shows: functions of the catalogue look past it.
-- A table of that name that has been detached is none.
SELECT day FROM unnest($1::date[]) AS day
WHERE pg_partition_root(to_regclass('sidings.job_history_' || to_char(day, 'YYYYMMDD'))) = 'sidings.job_history'::regclass
