-- How many attempts of a file, which are in the table archive_file of this session, one day's partition has not, whose name stands
-- for {partition}.
SELECT count(*) FROM pg_temp.archive_file f
WHERE NOT EXISTS (SELECT FROM sidings.{partition} h
                  WHERE h.job_id = f.job_id AND h.attempt = f.attempt AND h.finished_at = f.finished_at)
