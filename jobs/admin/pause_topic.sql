-- $1 topic, $2 actor, $3 reason
SELECT sidings.pause_topic($1, $2, $3)
