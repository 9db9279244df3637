-- Which messages of a batch are duplicates? One statement for the whole batch, the first of the handlers' transaction, which
-- records the ids of all others; see the function. Index: message_seen_pkey of each day that is kept, one probe per id.
-- $1 ids, $2 partitions, $3 offsets
SELECT sidings.record_seen($1, $2, $3)
