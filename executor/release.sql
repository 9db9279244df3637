-- Give leases back. A statement of its own, after an acknowledged cycle that names no job of these origins: else a named
-- attempt is never accounted for, and executor before origin would reverse acquire's lock order. epoch + 1 fences our own
-- stragglers. $1 executor, $2 origins, $3 epochs
WITH mine AS (
    SELECT o.origin FROM sidings.origin o JOIN unnest($2::text[], $3::bigint[]) m (origin, epoch) USING (origin)
    WHERE (o.owner = $1) IS TRUE AND o.epoch = m.epoch ORDER BY o.origin FOR UPDATE OF o
)
UPDATE sidings.origin o SET owner = NULL, lease_until = NULL, epoch = o.epoch + 1
FROM mine WHERE o.origin = mine.origin
RETURNING o.origin
