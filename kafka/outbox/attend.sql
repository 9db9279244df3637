-- A relay's heartbeat, and what it needs to know: how many relays are alive, which place it has among them, which slots can be
-- had (free, or their lease has run out; `acquire` decides), when a person wants its failing topics tried again, which topics are
-- those of directory tables, and of which of them something is in doubt and due, and whose answer this is: a former primary may
-- live on. A topic that fails gets no more messages yet; not that of a relay without slots, which would not send them anyway, as
-- where it alone cannot reach Kafka.
-- $1 relay, $2 seconds to stay alive, $3 host, $4 pid, $5 origins of all slots, $6 whether to look for the rows of dead relays
-- Plan: outbox_relay_newest, once, and this relay's row where that has found it. By its key only a relay that did not count: beside
-- somebody's long transaction that steps over all former versions of the row, and the look for dead ones over those of all.
WITH alive AS MATERIALIZED (
    SELECT r.id, r.ctid AS place FROM sidings.outbox_relay r
    WHERE r.era > statement_timestamp() - interval '15 seconds' AND r.alive_until > statement_timestamp()
), renewed AS (
    UPDATE sidings.outbox_relay r SET alive_until = clock_timestamp() + $2 * interval '1 second'
    WHERE r.ctid = (SELECT a.place FROM alive a WHERE a.id = $1)
    RETURNING 1
), entered AS (
    INSERT INTO sidings.outbox_relay (id, alive_until, host, pid)
    SELECT $1, clock_timestamp() + $2 * interval '1 second', $3, $4 WHERE NOT EXISTS (SELECT FROM renewed)
    ON CONFLICT (id) DO UPDATE SET alive_until = excluded.alive_until
), gone AS (
    DELETE FROM sidings.outbox_relay r
    WHERE $6 AND r.alive_until < statement_timestamp() - interval '1 minute' AND r.id <> $1
)
SELECT sidings.timeline() AS timeline,
       (SELECT count(*) FROM alive a WHERE a.id <> $1) AS others,
       (SELECT count(*) FROM alive a WHERE a.id < $1) AS place,
       ARRAY(SELECT w FROM unnest($5::text[]) w LEFT JOIN sidings.origin o ON o.origin = w
             WHERE o.owner IS NULL OR o.lease_until < clock_timestamp() ORDER BY w) AS free,
       ARRAY(SELECT t.topic FROM sidings.outbox_topic t
             WHERE t.relay = $1 AND t.retry_at <= clock_timestamp() ORDER BY t.topic) AS due,
       ARRAY(SELECT d.topic FROM sidings.directory d) AS directories,
       ARRAY(SELECT d.topic FROM sidings.directory d
             WHERE EXISTS (SELECT FROM sidings.directory_doubt x WHERE x.topic = d.topic AND x.due_at <= clock_timestamp())
               AND NOT EXISTS (SELECT FROM sidings.outbox_topic t JOIN sidings.origin o ON o.owner = t.relay
                               WHERE t.topic = d.topic AND o.origin = ANY ($5) AND o.lease_until >= clock_timestamp())
            ) AS doubtful
