-- A cycle in which nothing has finished: `cycle.sql` without the parts that have nothing to do. To set up their plan takes a third of a
-- millisecond, on the way of each job that comes alone. Fence, number, timeline and locks are those of begin_cycle(), as there.
--
-- $1 executor, $2 cycle, $3 fence, $4 ids that run or are about to, $5 the timeline that all this was read from (null: nothing was)
SELECT b.applied::int AS applied, 0 AS succeeded, 0 AS other
FROM sidings.begin_cycle($1, $2, $3, $4::text::bigint[], $5::text) AS b (applied)
