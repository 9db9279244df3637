-- THE CYCLE: everything that has finished, and everything that is about to run, in one round trip.
--
-- The fence is the compare-and-set on the executor's own row, and every other part depends on it: a takeover has bumped
-- `fence`, so a stale cycle is void as a whole; the cycle number makes a repetition after a lost connection safe. Joining
-- origin.epoch instead does not fence (docs/decisions/0002-fence.md). It also tests the timeline: after a failover that
-- has lost commits, ids, attempts and cycle numbers are handed out a second time (docs/decisions/0017-failover.md).
-- begin_cycle() locks the row and compares afterwards: a cycle that is sent while the one before it is at work waits for it.
-- Lock order: executor, then jobs by primary key. Never origin: acquire locks origin before executor.
-- Plan: index scans on executor_pkey and job_pkey, driven by unnest(); never a scan of job.
--
-- $1 executor, $2 cycle, $3 fence, $4 ids that run or are about to,
-- succeeded: $5 ids, $6 attempts (empty: all are first ones), $7 epochs (empty: all are $12), $8 microseconds since start,
-- $9 microseconds since end
-- $10 all other outcomes as jsonb, $11 types that leave no history, but of what is discarded or followed
-- $13 the timeline that all this was read from (null: nothing was)
-- Whole numbers come as the text of an array: asyncpg takes three times as long to encode the array itself, Postgres does not;
-- it does for fractions.
-- Times go as ages, so that only the server's clock stands in the history; they count from the arrival of the statement, whatever
-- it has waited for.
WITH me AS MATERIALIZED (
    SELECT date_part('epoch', statement_timestamp()) AS sent
    FROM sidings.begin_cycle($1, $2, $3, $4::text::bigint[], $13::text) AS b (applied) WHERE b.applied
), succeeded AS (
    DELETE FROM sidings.job j
    USING me, unnest($5::text::bigint[], $6::text::int[], $7::text::bigint[], $8::text::bigint[], $9::text::bigint[])
              AS f (id, attempt, epoch, started, finished)
    WHERE j.id = f.id AND j.attempt = coalesce(f.attempt, 1)
    RETURNING j.id, coalesce(f.epoch, $12::bigint) AS epoch, j.enqueued_at, j.run_at,
              to_timestamp(me.sent - f.started / 1e6::float8) AS started_at,
              to_timestamp(me.sent - f.finished / 1e6::float8) AS finished_at, j.attempt, j.priority, j.type, j.origin, j."group", j.headers
), other AS MATERIALIZED (
    SELECT o.*, me.sent FROM me, jsonb_to_recordset($10::jsonb)
        AS o (id bigint, attempt int, epoch bigint, action text, outcome text, started float8, finished float8, due float8, delay float8,
              failed int, inconclusive boolean, reason text, follow_up jsonb, error_class text, error_message text, error_fingerprint text)
), gone AS (
    DELETE FROM sidings.job j USING other o
    WHERE o.action = 'end' AND j.id = o.id AND j.attempt = o.attempt
    RETURNING j.*, o.epoch, o.sent, o.outcome, o.started, o.finished, o.due, o.error_class, o.error_message, o.error_fingerprint, o.follow_up, true AS keep
), followed AS (   -- by a new job at the end of its group, in the same origin. A cycle that has none is sent without this part
                   -- (docs/decisions/0030-follow-ups.md)
    INSERT INTO sidings.job (type, origin, "group", priority, policy, headers, payload)
    SELECT g.follow_up ->> 'type', g.origin, CASE WHEN (g.follow_up -> 'grouped')::boolean THEN g."group" END, g.priority,
           (g.follow_up -> 'policy')::smallint,
           coalesce(g.headers, '{}') - 'sidings-idempotency-key' || (g.follow_up -> 'headers'),   -- without its key: another effect
           g.payload
    FROM gone g WHERE g.follow_up IS NOT NULL
), again AS (   -- a job that is in no group's order is delayed: promoted when due. 'block': its group waits for a person
    UPDATE sidings.job j
    SET attempt = j.attempt + 1, failures = j.failures + o.failed,
        losses = CASE WHEN o.inconclusive THEN j.losses ELSE 0 END,   -- see docs/decisions/0004-losses.md
        run_at = CASE WHEN o.action = 'block' THEN 'infinity' ELSE clock_timestamp() + o.delay * interval '1 second' END,
        error = CASE WHEN o.failed = 0 THEN j.error ELSE left(concat_ws(': ', o.error_class, o.error_message), 1000) END,
        first_started_at = CASE WHEN o.failed = 0 THEN j.first_started_at
                                ELSE coalesce(j.first_started_at, to_timestamp(o.sent - o.started)) END,
        position = CASE WHEN j."group" IS NULL OR j.policy = 2 THEN NULL ELSE j.position END
    FROM other o
    WHERE o.action IN ('again', 'block') AND j.id = o.id AND j.attempt = o.attempt
    RETURNING j.*, o.epoch, o.sent, o.outcome, o.started, o.finished, o.due, o.error_class, o.error_message, o.error_fingerprint, o.follow_up, false AS keep
), held AS (
    UPDATE sidings.job j
    SET attempt = j.attempt + 1, held = o.reason, position = NULL, losses = 0,
        error = left(concat_ws(': ', o.error_class, o.error_message), 1000)
    FROM other o
    WHERE o.action = 'hold' AND j.id = o.id AND j.attempt = o.attempt
    RETURNING j.*, o.epoch, o.sent, o.outcome, o.started, o.finished, o.due, o.error_class, o.error_message, o.error_fingerprint, o.follow_up, false AS keep
), unsuccessful AS (
    SELECT * FROM gone UNION ALL SELECT * FROM again UNION ALL SELECT * FROM held
), history AS (
    INSERT INTO sidings.job_history
        (job_id, epoch, enqueued_at, due_at, started_at, finished_at, executor, attempt, outcome, priority, type, origin,
         "group", error_class, error_message, error_fingerprint, correlation_id, headers, payload)
    SELECT s.id, s.epoch, s.enqueued_at, s.run_at, s.started_at, s.finished_at, $1, s.attempt, 'succeeded', s.priority, s.type, s.origin,
           s."group", NULL, NULL, NULL, s.headers ->> 'correlation_id', NULL, NULL
    FROM succeeded s WHERE s.type <> ALL ($11::text[])
    UNION ALL
    SELECT u.id, u.epoch, u.enqueued_at, to_timestamp(u.sent - u.due), to_timestamp(u.sent - u.started),
           to_timestamp(u.sent - u.finished), $1,
           CASE WHEN u.keep THEN u.attempt ELSE u.attempt - 1 END, u.outcome::sidings.outcome, u.priority, u.type, u.origin,
           u."group", u.error_class, u.error_message, u.error_fingerprint, u.headers ->> 'correlation_id',
           CASE WHEN u.keep THEN u.headers END,   -- to be requeued with
           CASE WHEN u.keep THEN coalesce(u.payload, 'null') END   -- without any it is erased, and not requeued
    FROM unsuccessful u WHERE u.type <> ALL ($11::text[]) OR u.outcome IN ('discarded', 'followed')   -- its payload, and why, is nowhere else
)
SELECT (SELECT count(*) FROM me) AS applied, (SELECT count(*) FROM succeeded) AS succeeded,
       (SELECT count(*) FROM unsuccessful) AS other
