-- runs with 0051
--
-- Forget the ids of messages that a consumer's transaction has recorded (sidings.record_seen) and does not come to, as with slow
-- handlers: they count for nothing. Whether they will be delivered again nobody knows: where their log is replaced, cut off or
-- compacted, another message with the id may be all that is left. Only the rows of these very places: the id of a repeat is
-- another message's. Only those of this transaction, which has recorded them outside of any savepoint: another instance may have
-- handled the message, and where no message of a partition was come to, its offset is not compared.
--
-- Index: message_seen_pkey of each day that is kept, one probe per id; sequential scans are off for the reason given at
-- sidings.parked. No join: a plan for one that was made while the days were empty might read an index through.
CREATE FUNCTION sidings.take_back_seen(ids bytea[], partitions integer[], offsets bigint[]) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    DELETE FROM sidings.message_seen s
    WHERE s.id = ANY (ids) AND s.xmin = pg_current_xact_id()::xid
      AND s.partition = partitions[array_position(ids, s.id)] AND s."offset" = offsets[array_position(ids, s.id)];
END $$;
