-- Jobs at positions that no sequence comes to, as a mistaken INSERT may give them: they get the next ones, in their order. To move the
-- sequence past them, as advance.sql does for rows that a replication has brought, would leave it none to hand out.
-- What runs meanwhile may be among them: outcomes find their job by its id. Like all that changes a waiting row, with a new txid.
-- The key-share lock on (origin, epoch) keeps a superseded owner out. Returns how many.
-- Plan: job_scan, one probe per origin, then job_pkey.
-- $1 executor, $2 origins, $3 epochs, $4 the last position that a sequence may come to, $5 most jobs
WITH mine AS MATERIALIZED (
    SELECT o.origin FROM unnest($2::text[], $3::bigint[]) m (origin, epoch)
    JOIN sidings.origin o ON o.origin = m.origin AND o.epoch = m.epoch AND o.owner = $1
    FOR KEY SHARE OF o
), numbered AS MATERIALIZED (
    SELECT d.id, CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('sidings.job_position') END AS position
    FROM (SELECT j.id FROM sidings.job_position p, mine,
                 LATERAL (SELECT j.id, j.position FROM sidings.job j
                          WHERE j.origin = mine.origin AND j.position > greatest($4::bigint, p.last_value)
                          ORDER BY j.position LIMIT $5) j
          ORDER BY j.position LIMIT $5) d
), renumbered AS (
    UPDATE sidings.job j SET position = n.position, txid = pg_current_xact_id()
    FROM numbered n WHERE j.id = n.id AND j.position IS NOT NULL
    RETURNING j.id
)
SELECT count(*) FROM renumbered
