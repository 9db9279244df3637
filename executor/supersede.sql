-- Of the waiting jobs of one type in one group only the newest is left; the others end as superseded, so many at a time
-- that the call ends in its time. It inherits the failures of those, or a steady stream of new jobs would never back off, and
-- their losses, or one whose handler kills its executor would never be found out. A loss alone does not shift when it is due.
--
-- Called for lanes of which nothing runs, while no read is under way: what it deletes is in no answer that is still to come.
-- The key-share lock on (origin, epoch) keeps a superseded owner out. Newest is the largest id: a job that commits late has
-- a smaller id, and runs, if it has not been seen here. A row that somebody else has locked is left for another time; where
-- that is the newest one's, it inherits nothing: an update would wait, and all that is to be read with it.
-- $1 executor; of each lane: $2 origin, $3 epoch, $4 group, $5 type; $6 types that leave no history, $7 most jobs of a lane
-- Plan: job_group for each lane, then job_pkey.
WITH mine AS MATERIALIZED (
    SELECT m.* FROM unnest($2::text[], $3::bigint[], $4::text[], $5::text[]) WITH ORDINALITY m (origin, epoch, "group", type, ref)
    JOIN sidings.origin o ON o.origin = m.origin AND o.epoch = m.epoch AND o.owner = $1
    FOR KEY SHARE OF o
), newest AS MATERIALIZED (
    SELECT m.*, (SELECT max(j.id) FROM sidings.job j
                 WHERE j.origin = m.origin AND j."group" = m."group" AND j.position IS NOT NULL
                   AND j.type = m.type AND j.policy = 1) AS id
    FROM mine m
), older AS MATERIALIZED (
    SELECT n.ref, n.epoch, n.id AS newest, o.id FROM newest n,
         LATERAL (SELECT j.id FROM sidings.job j
                  WHERE j.origin = n.origin AND j."group" = n."group" AND j.position IS NOT NULL
                    AND j.type = n.type AND j.policy = 1 AND j.id < n.id
                  ORDER BY j.position LIMIT $7 FOR UPDATE SKIP LOCKED) o
), superseded AS (
    DELETE FROM sidings.job j USING older o WHERE j.id = o.id
    RETURNING j.*, o.ref, o.epoch, o.newest
), inherited AS (
    UPDATE sidings.job j
    SET failures = greatest(j.failures, s.failures), losses = greatest(j.losses, s.losses),
        first_started_at = least(j.first_started_at, s.first_started_at), run_at = greatest(j.run_at, s.run_at),
        error = coalesce(j.error, s.error)
    FROM (SELECT u.newest, max(u.failures) AS failures, max(u.losses) AS losses,
                 min(u.first_started_at) FILTER (WHERE u.failures > 0) AS first_started_at,
                 max(u.run_at) FILTER (WHERE u.failures > 0) AS run_at, max(u.error) FILTER (WHERE u.failures > 0) AS error
          FROM superseded u WHERE u.failures > 0 OR u.losses > 0 GROUP BY u.newest) s,
         LATERAL (SELECT k.id FROM sidings.job k WHERE k.id = s.newest FOR UPDATE SKIP LOCKED) free
    WHERE j.id = free.id
), history AS (
    INSERT INTO sidings.job_history
        (job_id, epoch, enqueued_at, due_at, finished_at, executor, attempt, outcome, priority, type, origin, "group",
         correlation_id, headers, payload)
    SELECT u.id, u.epoch, u.enqueued_at, u.run_at, clock_timestamp(), $1, u.attempt, 'superseded', u.priority, u.type, u.origin,
           u."group", u.headers ->> 'correlation_id', u.headers, coalesce(u.payload, 'null')   -- without any it is erased, and not requeued
    FROM superseded u WHERE u.type <> ALL ($6::text[])
)
-- One pass: asked for by each lane, the count would go through all that were superseded, which are on disk by then.
SELECT ref::int, max(id) AS id, count(*) - 1 AS superseded
FROM (SELECT n.ref, n.id FROM newest n UNION ALL SELECT u.ref, NULL FROM superseded u) every GROUP BY ref
