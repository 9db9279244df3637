-- Which of these keys have a message that waits as a job: their later messages have to wait behind it.
-- One statement per batch, in the handlers' transaction. Only the process whose compare-and-set succeeds can park, so
-- that an answer "none" stays true until the commit. A held message has left its order and is not waited for.
-- Index: job_message, by nested loop; see the function.
-- A text each, because a driver encodes the texts of an array one by one.
-- $1 origins, $2 groups
SELECT p.origin, p."group" FROM sidings.parked(string_to_array($1, E'\x1f'), string_to_array($2, E'\x1f')) p
