-- $1 actor, $2 reason, $3 type, $4 origin, $5 group
SELECT sidings.pause_jobs($1, $2, $3, $4, $5)
