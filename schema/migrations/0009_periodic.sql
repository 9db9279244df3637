-- Periodic jobs: how far the ticks of each schedule have been turned into jobs (docs/periodic.md).
--
-- One row per periodic job type; for those of every origin, one per origin. A tick becomes a job in the statement that
-- moves `last_tick` to it by compare-and-set, so whoever tries, there is one job per tick.
CREATE TABLE sidings.periodic (
    since      timestamptz NOT NULL DEFAULT clock_timestamp(),    -- when this schedule came into force: no tick before it counts
    seen_at    timestamptz NOT NULL DEFAULT clock_timestamp(),    -- when an executor with this schedule last looked
    last_tick  timestamptz,                                       -- the last one that became a job; null: none yet
    name       text NOT NULL,                                     -- the job type
    origin     text NOT NULL DEFAULT '',                          -- '': per service
    schedule   text NOT NULL,                                     -- in force: 'cron, time zone' or 'every n s'
    job_origin text,                                              -- where the last tick's job went
    CONSTRAINT periodic_pkey PRIMARY KEY (name, origin)
) WITH (
    fillfactor = 50,                       -- no index holds what changes: HOT updates
    autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_scale_factor = 0
);
