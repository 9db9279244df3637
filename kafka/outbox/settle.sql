-- Publish what a directory table says of keys in doubt that are due, and look at them again after 5 s, 1 and 12 minutes: a
-- packet that was lost is sent again within minutes, at intervals that double. In one statement, so that a key is either
-- published or still in doubt. Another relay's are skipped. What belongs to no table any more goes: of the topics next to those of
-- tables, so that it is not looked for among all that are in doubt.
--
-- Plan: index scans of directory_doubt_due and directory_doubt_pkey. $1 topic
WITH due AS MATERIALIZED (
    SELECT d.topic, d.key, d.since + 12 * (d.due_at - d.since) AS next, d.due_at - d.since > interval '5 minutes' AS over
    FROM sidings.directory_doubt d
    WHERE d.topic = $1 AND d.due_at <= clock_timestamp()
    ORDER BY d.due_at LIMIT 10000 FOR UPDATE SKIP LOCKED
), over AS (
    DELETE FROM sidings.directory_doubt x USING due d WHERE x.topic = d.topic AND x.key = d.key AND d.over
), again AS (
    UPDATE sidings.directory_doubt x SET due_at = d.next FROM due d WHERE x.topic = d.topic AND x.key = d.key AND NOT d.over
), gone AS (
    DELETE FROM sidings.directory_doubt x WHERE x.topic = ANY (ARRAY(
        SELECT n.topic
        FROM (SELECT d.topic FROM sidings.directory d UNION ALL SELECT '') d,
             LATERAL (SELECT y.topic FROM sidings.directory_doubt y WHERE y.topic > d.topic ORDER BY y.topic LIMIT 1) n
        WHERE n.topic NOT IN (SELECT d.topic FROM sidings.directory d)))
)
SELECT CASE WHEN EXISTS (SELECT FROM due) THEN sidings.directory_repeat($1, ARRAY(SELECT d.key FROM due d)) END AS repeated
