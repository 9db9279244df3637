-- $1 origin, $2 group, $3 actor, $4 reason
SELECT sidings.release_group($1, $2, $3, $4)
