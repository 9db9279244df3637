-- Which messages of a batch are duplicates? One statement for the whole batch, the first of the handlers' transaction, which
-- records the ids of all others; see the function. Index: message_seen_pkey of each day that is kept, one probe per id.
-- An id is another transaction's until that ends, which may take as long as a handler: it is waited for shortly, since all
-- of the batch waits; then the message with that id waits alone. The handlers' own statements wait as before.
-- $1 ids, $2 partitions, $3 offsets
WITH guard AS MATERIALIZED (
    SELECT current_setting('lock_timeout') AS former, set_config('lock_timeout', '500ms', true) AS own
), its AS MATERIALIZED (
    SELECT sidings.record_seen($1, $2, $3) AS repeats, g.former FROM guard g WHERE g.own IS NOT NULL
)
SELECT i.repeats FROM its i WHERE set_config('lock_timeout', i.former, true) IS NOT NULL
