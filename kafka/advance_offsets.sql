-- THE COMPARE-AND-SET that makes effects happen once: one statement for all partitions of a batch, the last before the
-- handlers' transaction commits. It expects the offset that is *stored*: a log has gaps (transaction markers, compaction),
-- so no arithmetic on messages' offsets can know it. A partition that another process has moved on yields no row, and
-- then the whole transaction is rolled back. So does one that was reset, even where its offset has come back to the same.
-- It stands last, so that its row locks live for one round trip; should this process be paused right there, the server
-- ends the transaction after five seconds instead of letting the partition's next owner wait.
-- The arrays are sorted, and the nested loop locks in their order: two processes that both believe to own the same
-- partitions do not deadlock. Index: consumer_offset_pkey.
-- $1 topics, $2 partitions, $3 expected offsets, $4 next offsets, $5 expected numbers of resets, $6 leaders' epochs of the
-- records before the next offsets, or nulls
WITH guard AS MATERIALIZED (
    SELECT set_config('idle_in_transaction_session_timeout', '5s', true)
)
UPDATE sidings.consumer_offset c
SET next_offset = m.next, leader_epoch = m.epoch, epoch_offset = m.next
FROM guard, unnest($1::text[], $2::int[], $3::bigint[], $4::bigint[], $5::bigint[], $6::int[])
                AS m (topic, partition, expected, next, resets, epoch)
WHERE c.topic = m.topic AND c.partition = m.partition AND c.next_offset = m.expected AND c.resets = m.resets
RETURNING c.topic, c.partition
