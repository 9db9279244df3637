-- `name.sql`, with the jobs that it names although they have not been read: a job that comes alone takes one statement, and no read
-- beside it (docs/decisions/0020-naming-early.md).
--
-- Only jobs that could start now: first attempts, the first ones of their groups in this snapshot (a parallel one has no order), and
-- none while anything is paused, for the client may not know of it yet. All others, those of policy latest, which a newer one may
-- have superseded, and large payloads are left to a read. The
-- snapshot is older than the lock that begin_cycle() waits for: who has ended, changed or paused one of them in between has bumped the
-- fence, and the cycle is void. To the reader's marks nothing of this is known: it brings the same jobs once more, if they are still
-- there.
--
-- $1 executor, $2 cycle, $3 fence, $4 ids that run or are about to, $5 the timeline that all this was read from (null: nothing was),
-- $6 ids of those that are to be brought
-- Plan: index scans on job_pkey and job_group; never a scan of job. Beside a long transaction that on job_group steps over all of the
-- group that has ended since: where that takes long, jobs are left to reads for a while (`CycleLoop.expect`).
SELECT b.applied::int AS applied, 0 AS succeeded, 0 AS other, j.id, j.type, j.origin, j."group", j.position,
       j.priority, j.policy, date_part('epoch', j.enqueued_at) AS enqueued_at, j.headers, j.payload
FROM sidings.begin_cycle($1, $2, $3, $4::text::bigint[], $5::text) AS b (applied)
LEFT JOIN (
    SELECT j.* FROM sidings.job j
    WHERE j.id = ANY ($6::text::bigint[]) AND j.position IS NOT NULL AND j.run_at IS NULL AND j.attempt = 1 AND j.failures = 0 AND j.losses = 0
          AND j.policy <> 1
          AND pg_column_compression(j.payload) IS NULL AND coalesce(pg_column_size(j.payload), 0) < 8000
          AND NOT EXISTS (SELECT FROM sidings.pause)
          AND (j.policy = 2 OR NOT EXISTS (SELECT FROM sidings.job k WHERE k.origin = j.origin AND k."group" = j."group" AND k.position < j.position))
) j ON b.applied
