-- The ids of messages that a batch has recorded and did not come to: they count for nothing. Sent where it ends early, as with
-- slow handlers, after these. Only the rows of these very places: the id of a repeat is another message's. Only those of this
-- transaction, which has recorded them outside of any savepoint: another instance may have handled the message, and where no
-- message of a partition was come to, its offset is not compared.
-- Index: message_seen_pkey of each day that is kept, one probe per id. No join: a plan for one that was made while the days were
-- empty might read an index through. Who calls it has switched sequential scans off; they are as before afterwards.
-- $1 ids, $2 partitions, $3 offsets, $4 enable_seqscan as it was
WITH gone AS (
    DELETE FROM sidings.message_seen s
    WHERE s.id = ANY ($1::bytea[]) AND s.xmin = pg_current_xact_id()::xid
      AND s.partition = ($2::int[])[array_position($1::bytea[], s.id)]
      AND s."offset" = ($3::bigint[])[array_position($1::bytea[], s.id)]
    RETURNING s.id
)
SELECT count(*), set_config('enable_seqscan', $4, true) FROM gone
