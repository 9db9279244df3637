-- Renew the listed leases. Locks sorted, SKIP LOCKED: one stuck row never costs the other leases, two renewals never
-- deadlock. Matches (owner, epoch), never the epoch alone. A wish of another executor is handed on.
-- timeline: whose answer this is; a former primary may live on. $1 executor, $2 origins, $3 epochs, $4 lease
-- The epochs come as text: of other arrays than those of texts asyncpg asks what they are, on each new connection, in two
-- statements more, for which a renewal has no time.
-- Plan: probes of origin_pkey (the owner is compared so that no index of it is used), and a hashed subplan. A join with `renewed`
-- would become a nested loop in the generic plan, which takes arrays for short ones: with 1,000 origins ten times as long.
WITH mine AS (
    SELECT o.origin FROM sidings.origin o JOIN unnest($2::text[], $3::text::bigint[]) m (origin, epoch) USING (origin)
    WHERE (o.owner = $1) IS TRUE AND o.epoch = m.epoch
    ORDER BY o.origin FOR NO KEY UPDATE OF o SKIP LOCKED
), renewed AS (
    UPDATE sidings.origin o SET lease_until = clock_timestamp() + $4 FROM mine WHERE o.origin = mine.origin
    RETURNING o.origin, CASE WHEN o.wanted_until > clock_timestamp() THEN o.wanted_generation END AS wanted_generation
)
SELECT origin, true AS renewed, true AS held, wanted_generation, (SELECT sidings.timeline()) AS timeline FROM renewed
UNION ALL
SELECT m.origin, false, (o.owner = $1 AND o.epoch = m.epoch) IS TRUE, NULL, (SELECT sidings.timeline())
FROM unnest($2::text[], $3::text::bigint[]) m (origin, epoch) LEFT JOIN sidings.origin o USING (origin)
WHERE m.origin NOT IN (SELECT r.origin FROM renewed r)
