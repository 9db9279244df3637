-- runs with 0051
--
-- THE COMPARE-AND-SET that makes effects happen once: the offsets of a batch, moved as the last thing before the handlers'
-- transaction commits. It expects the offset that is *stored*: a log has gaps (transaction markers, compaction), so no
-- arithmetic on messages' offsets can know it. A partition that another process has moved on yields no row, and then the whole
-- transaction is rolled back. So does one that was reset, even where its offset has come back to the same.
--
-- A loop, which locks in the order of the arrays, whatever the planner makes of the table; they are sorted, so that two
-- processes that both believe to own the same partitions do not deadlock. It runs on the connection of the service author's own
-- statements, where the level may be SERIALIZABLE: what reads the table, or its index, is in conflict there with all that move
-- another offset meanwhile. Index: consumer_offset_pkey, one probe per partition; sequential scans are off for the reason given
-- at sidings.parked. A row that is written at once counts as read no more, so that rows of one page do not come to count as all
-- of it.
CREATE FUNCTION sidings.advance_offsets(topics text[], partitions integer[], expected bigint[], nexts bigint[], counts bigint[],
                                        epochs integer[]) RETURNS TABLE (topic text, partition integer)
LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    PERFORM set_config('idle_in_transaction_session_timeout', '5s', true);
    FOR i IN 1 .. cardinality(topics) LOOP
        RETURN QUERY
            UPDATE sidings.consumer_offset c
            SET next_offset = nexts[i], leader_epoch = epochs[i], epoch_offset = nexts[i]
            WHERE c.topic = topics[i] AND c.partition = partitions[i] AND c.next_offset = expected[i] AND c.resets = counts[i]
            RETURNING c.topic, c.partition;
    END LOOP;
END $$;
