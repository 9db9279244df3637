-- $1 origin, $2 group, $3 actor, $4 reason, $5 also those that run, $6 most
SELECT sidings.clear_group($1, $2, $3, $4, $5, $6)
