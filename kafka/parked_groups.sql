-- Which of these keys have a message that waits as a job: their later messages have to wait behind it.
-- One statement per batch, in the handlers' transaction; only the process whose compare-and-set succeeds can park, so
-- that an answer "none" stays true until the commit. A held message has left its order and is not waited for.
-- $1 origins, $2 groups, of one topic
SELECT k.origin, k."group"
FROM unnest($1::text[], $2::text[]) AS k (origin, "group")
WHERE EXISTS (SELECT FROM sidings.job j
              WHERE j.origin = k.origin AND j."group" = k."group" AND j.position IS NOT NULL
                AND j.type LIKE 'message:%')
