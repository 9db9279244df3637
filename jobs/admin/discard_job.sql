-- $1 id, $2 actor, $3 reason
SELECT sidings.discard_job($1, $2, $3)
