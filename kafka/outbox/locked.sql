-- Which of these messages are locked by somebody else's transaction right now. $1 slots, $2 ids
SELECT x.slot, x.id
FROM unnest($1::smallint[], $2::bigint[]) u (slot, id) JOIN sidings.outbox x ON x.slot = u.slot AND x.id = u.id
WHERE (x.slot, x.id) NOT IN (
    SELECT k.slot, k.id
    FROM unnest($1::smallint[], $2::bigint[]) f (slot, id) JOIN sidings.outbox k ON k.slot = f.slot AND k.id = f.id
    FOR UPDATE OF k SKIP LOCKED)
