-- What persons did to one job, oldest first. Plan: audit_job. $1 id
SELECT a.id, a.at, a.actor, a.action, a.target::text AS target, a.reason, a.detail::text AS detail
FROM sidings.audit a WHERE a.target ? 'job' AND (a.target ->> 'job')::bigint = $1 ORDER BY a.id
