-- runs with 0051
--
-- While somebody's transaction is open, no former version of a row can be removed. Of the rows that are written anew all the
-- time, an executor's and a partition's offset, each look by the key stepped over all of them: 2 ms after 100,000 cycles, or
-- batches. Hence these indexes, which have the newest versions last. `era` moves on in one of some hundreds of updates; the
-- others stay HOT. So a look steps over the versions of one era. Which version is the row does not depend on it: there is
-- one at most that a transaction sees. The keys stand in these indexes in another form, else the planner takes the primary
-- key for as good: it counts on one version.
ALTER TABLE sidings.executor ADD COLUMN era integer NOT NULL DEFAULT 0;
CREATE INDEX executor_newest ON sidings.executor (uuid_send(id), era);
ALTER TABLE sidings.consumer_offset ADD COLUMN era integer NOT NULL DEFAULT 0;
CREATE INDEX consumer_offset_newest ON sidings.consumer_offset ((topic || ''), partition, era);

-- The fence of a cycle: lock the executor's row by its id, which waits for a cycle that is at work, then compare and set.
-- Each statement in here has a snapshot of its own, so what was waited for is seen by the comparison. As a part of the
-- cycle's statement it would either pass the row over or be looked at again, with all of that statement's plan set up anew
-- (docs/decisions/0018-two-cycles.md). Returns whether the cycle may go on; if not, it is void.
CREATE OR REPLACE FUNCTION sidings.begin_cycle(me uuid, number bigint, its_fence bigint, named bigint[], its_timeline text) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    place tid;
BEGIN
    SELECT e.ctid INTO place FROM sidings.executor e
    WHERE uuid_send(e.id) = uuid_send(me) ORDER BY e.era DESC LIMIT 1 FOR NO KEY UPDATE;
    UPDATE sidings.executor e SET running = named, cycle = number, era = number / 256
    WHERE e.ctid = place AND e.cycle = number - 1 AND e.fence = its_fence
          AND (its_timeline IS NULL OR sidings.timeline() = its_timeline);
    RETURN FOUND;
END
$$;

-- THE COMPARE-AND-SET that makes effects happen once: the offsets of a batch, moved as the last thing before the handlers'
-- transaction commits. It expects the offset that is *stored*: a log has gaps (transaction markers, compaction), so no
-- arithmetic on messages' offsets can know it. A partition that another process has moved on yields no row, and then the whole
-- transaction is rolled back. So does one that was reset, even where its offset has come back to the same.
--
-- A loop, which locks in the order of the arrays, whatever the planner makes of the table; they are sorted, so that two
-- processes that both believe to own the same partitions do not deadlock. It runs on the connection of the service author's own
-- statements, where the level may be SERIALIZABLE: what reads the table, or its index, is in conflict there with all that move
-- another offset meanwhile. Index: consumer_offset_newest, one probe per partition; sequential scans are off for the reason given
-- at sidings.parked. A row that is written at once counts as read no more, so that rows of one page do not come to count as all
-- of it.
CREATE OR REPLACE FUNCTION sidings.advance_offsets(topics text[], partitions integer[], expected bigint[], nexts bigint[], counts bigint[],
                                                   epochs integer[]) RETURNS TABLE (topic text, partition integer)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    place tid;
BEGIN
    PERFORM set_config('idle_in_transaction_session_timeout', '5s', true);
    FOR i IN 1 .. cardinality(topics) LOOP
        SELECT c.ctid INTO place FROM sidings.consumer_offset c
        WHERE c.topic || '' = topics[i] AND c.partition = partitions[i] ORDER BY c.era DESC LIMIT 1 FOR NO KEY UPDATE;
        RETURN QUERY
            UPDATE sidings.consumer_offset c
            SET next_offset = nexts[i], leader_epoch = epochs[i], epoch_offset = nexts[i],
                era = c.era + (nexts[i] / 1024 <> expected[i] / 1024)::integer
            WHERE c.ctid = place AND c.next_offset = expected[i] AND c.resets = counts[i]
            RETURNING c.topic, c.partition;
    END LOOP;
END $$;
