-- Move stored offsets by order of a person, and cancel the jobs of messages that will be delivered again: one fenced
-- statement for all partitions; see the function. $1 topic, $2 partitions, $3 offsets, $4 who, $5 why, $6 the topic's id or null, $7 where
-- logs were cut off, or nulls
SELECT its_partition, former, cancelled FROM sidings.reset_offsets($1, $2, $3, $4, $5, $6, $7)
