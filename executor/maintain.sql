-- Partitions of the history, rows of executors that are long gone. $1 days to keep
SELECT sidings.maintain($1)
