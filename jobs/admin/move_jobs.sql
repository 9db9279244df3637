-- $1 origin, $2 to, $3 actor, $4 reason, $5 longest lease
SELECT sidings.move_jobs($1, $2, $3, $4, $5)
