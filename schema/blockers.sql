-- Whose locks a session waits for. $1: its pid. Prepared transactions have the pid 0, and no session.
SELECT DISTINCT b.pid, a.usename AS role, a.application_name AS application, a.state, left(a.query, 200) AS query,
       date_trunc('second', clock_timestamp() - a.xact_start)::text AS open_for
FROM unnest(pg_blocking_pids($1)) b (pid)
LEFT JOIN pg_stat_activity a ON a.pid = b.pid
ORDER BY b.pid
