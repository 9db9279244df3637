-- What persons did, newest first. Plan: audit_pkey backwards. $1 before this id, $2 actor or null, $3 action or null, $4 most
SELECT a.id, a.at, a.actor, a.action, a.target::text AS target, a.reason, a.detail::text AS detail
FROM sidings.audit a
WHERE a.id < $1 AND ($2::text IS NULL OR a.actor = $2) AND ($3::text IS NULL OR a.action = $3)
ORDER BY a.id DESC LIMIT $4
