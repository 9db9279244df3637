-- $1 topic, $2 actor, $3 reason
SELECT sidings.resume_topic($1, $2, $3)
