-- The ids of messages that a batch has recorded and did not come to; see the function. Sent where it ends early, after these.
-- $1 ids, $2 partitions, $3 offsets
SELECT sidings.take_back_seen($1, $2, $3)
