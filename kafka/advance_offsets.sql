-- The compare-and-set of a batch's offsets, the last statement before the handlers' transaction commits; see the function. So
-- its row locks live for one round trip; should this process be paused right there, the server ends the transaction after
-- five seconds instead of letting the partition's next owner wait. The arrays are sorted.
-- $1 topics, $2 partitions, $3 expected offsets, $4 next offsets, $5 expected numbers of resets, $6 leaders' epochs of the
-- records before the next offsets, or nulls
SELECT a.topic, a.partition FROM sidings.advance_offsets($1, $2, $3, $4, $5, $6) a
