-- Attempts as a service leaves them, for the analysis of histories: $1 rows that ended on the day $2.
-- Types: half of all is the first of eight, and so on down. Origins: 24, the first ones busier. Groups: a hundredth of the rows, the
-- share of each falling with its number. Every fortieth job fails once, with one of five errors, and comes again after 30 s to 3 min;
-- one in 1,500 is discarded, one in 20,000 lost. Run and wait times are log-normal.
INSERT INTO sidings.job_history (job_id, epoch, enqueued_at, due_at, started_at, finished_at, executor, attempt, outcome, priority,
                                 type, origin, "group", error_class, error_message, error_fingerprint)
SELECT job, 1, ended - (run + wait) * interval '1 second', CASE WHEN again THEN ended - (run + wait) * interval '1 second' END,
       CASE WHEN outcome <> 'lost' THEN ended - run * interval '1 second' END, ended, '00000000-0000-4000-8000-000000000001',
       1 + again::int, outcome::sidings.outcome, 0, 'type_' || kind, 'transports/' || origin,
       CASE WHEN kind <> 3 THEN 'transport-' || bunch END,
       CASE WHEN failed THEN 'carrier.Unavailable' END, CASE WHEN failed THEN format('error %s of carrier %s', job % 5, job) END,
       CASE WHEN failed THEN left(md5((job % 5)::text), 16) END
FROM (
    SELECT *, outcome IN ('retried', 'discarded') AS failed,
           $2::date::timestamp AT TIME ZONE 'UTC'
               + (n::float8 / $1 + CASE WHEN again THEN 0.0003 + 0.0017 * random() ELSE 0 END) * interval '23 hours 50 minutes' AS ended
    FROM (
        SELECT n, n - again::int AS job, again,
               CASE WHEN n % 40 = 0 THEN 'retried' WHEN n % 1500 = 7 THEN 'discarded' WHEN n % 20000 = 9 THEN 'lost'
                    ELSE 'succeeded' END AS outcome,
               least(7, floor(-ln(1 - u) / ln(2::float8)))::int AS kind, floor(24 * v * v)::int AS origin, bunch,
               exp(random_normal(-2.5, 1)) AS run, exp(random_normal(-4, 1.5)) AS wait
        FROM (SELECT n, n % 40 = 1 AS again FROM generate_series(0, $1 - 1) AS n) AS numbers,
             -- a job's own, equal in all of its attempts
             LATERAL (SELECT (hashint8extended(n - again::int, 1) & 1048575) / 1048576.0::float8 AS u,
                             (hashint8extended(n - again::int, 2) & 1048575) / 1048576.0::float8 AS w) AS own,
             LATERAL (SELECT floor($1 / 100 * w * w)::bigint AS bunch) AS grouped,
             LATERAL (SELECT (hashint8extended(bunch, 3) & 1048575) / 1048576.0::float8 AS v) AS home
    ) AS drawn
) AS attempts
