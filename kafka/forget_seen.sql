-- Ids that this transaction has recorded, of messages that it has not come to. Index: message_seen_pkey of each day.
-- $1 ids, $2 partitions, $3 offsets
SELECT sidings.forget_seen($1, $2, $3)
