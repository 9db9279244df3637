-- runs with 0051
--
-- Which relays are alive is found by the newest versions of their rows, as 0062 has it for executors: a heartbeat went over all
-- versions of all relays, none of which can be removed while somebody's transaction is open. `era` is the quarter of a minute of
-- alive_until, so the other updates stay HOT; generated, since earlier releases do not write it. Few rows to a page at first: else
-- a page that many relays share is full after one update of each, and the next one of each is not HOT.
--
-- The new column writes the table anew, few rows; why it should, see 0062.
ALTER TABLE sidings.outbox_relay SET (fillfactor = 10);
ALTER TABLE sidings.outbox_relay ADD COLUMN era timestamptz NOT NULL
    GENERATED ALWAYS AS (date_bin('15 s', alive_until, '2000-01-01 00:00:00+00')) STORED;
CREATE INDEX outbox_relay_newest ON sidings.outbox_relay (era);

-- What is blocked, by origin: each instance counts its own every few seconds, and job_backoff has that of the whole service
-- together. Ordinary jobs do not stand in it. Building it reads the table, which stands still meanwhile.
CREATE INDEX job_blocked ON sidings.job (origin)
    WHERE run_at = 'infinity' AND position IS NOT NULL AND (attempt > 1 OR failures > 0);
