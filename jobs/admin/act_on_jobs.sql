-- The same done to many jobs in one transaction. $1 what, $2 ids, $3 actor, $4 reason, $5 if they are in this state still
SELECT job, state, code, refusal FROM sidings.act_on_jobs($1, $2, $3, $4, $5)
