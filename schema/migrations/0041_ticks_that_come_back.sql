-- A tick that is fired knows of those that have come back while it waited.
-- runs with 0019

-- Whether a tick of this periodic job waits or runs in this origin. Volatile: a snapshot of its own, for it is asked under the lock of its row
-- in `periodic`, and what had that lock before may have released one there, or moved it there. Plan: job_group.
CREATE FUNCTION sidings.tick_waits(its_type text, its_origin text) RETURNS boolean
LANGUAGE sql VOLATILE SET enable_seqscan = off SET enable_bitmapscan = off
RETURN EXISTS (SELECT FROM sidings.job j
               WHERE j.origin = its_origin AND j."group" = its_type AND j.type = its_type AND j.held IS NULL);
