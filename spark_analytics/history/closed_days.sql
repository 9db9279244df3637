-- The days that are over by the server's clock, since an hour so that few rows come late, and not in the archive with all of their
-- rows: those with a partition, and those of which the default partition has rows. `part`: the number of the file of the partition
-- that the day has now, or will get. What is in the default partition is not archived, whatever was: its partition was detached, or
-- somebody has dropped it. Nor is a partition that does not note late rows: the entry came from another server, of which this one was a
-- replica. Oldest first.
SELECT k.day, bool_or(k.divided) AS divided, coalesce(max(a.part) FILTER (WHERE a.dropped_at IS NOT NULL), 0) + 1 AS part,
       bool_or(k.watched) AND sidings.history_archived(k.day) AS archived, max(a.location) FILTER (WHERE a.dropped_at IS NULL) AS location,
       max(a.rows) FILTER (WHERE a.dropped_at IS NULL) AS rows
FROM (
    SELECT to_date(right(c.relname, 8), 'YYYYMMDD') AS day, true AS divided,
           EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = c.oid AND t.tgname = 'note_late_row') AS watched
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'sidings.job_history'::regclass AND c.relname ~ '^job_history_\d{8}$'
    UNION ALL
    SELECT DISTINCT (finished_at AT TIME ZONE 'UTC')::date, false, false FROM sidings.job_history_default
) AS k
LEFT JOIN sidings.history_archive a ON a.day = k.day
WHERE (k.day + 1)::timestamp AT TIME ZONE 'UTC' < now() - interval '1 hour'
GROUP BY k.day
ORDER BY k.day
