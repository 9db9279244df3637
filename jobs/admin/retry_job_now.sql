-- $1 id, $2 actor, $3 reason
SELECT sidings.retry_job_now($1, $2, $3)
