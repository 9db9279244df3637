-- Those of the days $1 that have a partition by now, whatever the transaction's snapshot shows.
SELECT day FROM unnest($1::date[]) AS day WHERE to_regclass('sidings.job_history_' || to_char(day, 'YYYYMMDD')) IS NOT NULL
