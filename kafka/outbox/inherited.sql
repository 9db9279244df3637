-- Up to which id messages stood in slots that were just acquired: their former owner may have sent these already.
-- Plan: the end of each slot in outbox_pkey. $1 slots
SELECT s.slot, (SELECT m.id FROM sidings.outbox m WHERE m.slot = s.slot ORDER BY m.id DESC LIMIT 1) AS id
FROM unnest($1::smallint[]) s (slot)
