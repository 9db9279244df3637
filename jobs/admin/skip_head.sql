-- $1 origin, $2 group, $3 actor, $4 reason, $5 the id that is expected
SELECT sidings.skip_head($1, $2, $3, $4, $5)
