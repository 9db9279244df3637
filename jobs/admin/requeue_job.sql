-- $1 id, $2 actor, $3 reason, $4 force
SELECT sidings.requeue_job($1, $2, $3, $4)
