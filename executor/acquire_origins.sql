-- Acquire free origins and take over expired ones, as the function `acquire` does, and tell whose answer this is: a former primary may live on and
-- grant leases that count nowhere, and a server that has just been promoted may lack the last renewals, or acquisitions altogether.
-- Always a row at least; its acquired is null where nothing was acquired.
-- $1 executor, $2 origins, $3 generation of our assignment, $4 lease, $5 whether expiry times may be believed; $6 those of $2 that nobody
-- else can have, whatever was lost: what the caller itself held until the failover
--
-- A server that has just been promoted may lack the acquisition by somebody who runs jobs under a lease of the former primary: what is free
-- there, looks run out, or is the caller's own, may be that one's. So it is asked for only where the timeline has been known for a lease;
-- all leases of former ones have run out by then. The first who finds another timeline notes it, which is after its promotion. Where the
-- clock was set back the note may lie ahead, and is written anew, or nothing would be acquired until the clock has got there.
--
-- registered: whether the executor has its row; without it nothing is acquired. `maintain` deletes that of one that has held nothing for
-- a day; it learnt of that when it held something again, which nobody could have then before that lease had run out.
WITH server AS MATERIALIZED (
    SELECT sidings.timeline() AS timeline  -- a standby has refused the statement by then, as one that writes
), noted AS (
    UPDATE sidings.service s SET timeline = server.timeline, timeline_since = clock_timestamp()
    FROM server WHERE s.timeline <> server.timeline OR s.timeline_since > clock_timestamp()
)
SELECT server.timeline, e.id IS NOT NULL AS registered, a.acquired, a.acquired_epoch, a.losses, a.former
FROM server
CROSS JOIN LATERAL (SELECT EXISTS (SELECT FROM sidings.service s
                                   WHERE s.timeline = server.timeline AND s.timeline_since + $4 < clock_timestamp())) k (known)
LEFT JOIN sidings.executor e ON e.id = $1
LEFT JOIN LATERAL sidings.acquire($1, CASE WHEN e.id IS NULL THEN '{}' WHEN k.known THEN $2::text[] ELSE $6::text[] END,
                                  $3, $4, $5) a ON true
