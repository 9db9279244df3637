-- $1 id, $2 actor, $3 reason, $4 force, $5 end of its last attempt, or null
SELECT sidings.requeue_job($1, $2, $3, $4, $5)
