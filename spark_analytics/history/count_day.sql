-- How many rows one day's partition has, whose name stands for {partition}, and how many came late that are not among the notes $2.
-- In one snapshot. $1 day
SELECT (SELECT count(*) FROM sidings.{partition}) AS rows,
       (SELECT count(*) FROM sidings.history_late WHERE day = $1 AND id <> ALL ($2::bigint[])) AS noted
