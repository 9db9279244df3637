-- What the table says of these keys cannot be published, so they are not asked for again. $1 topic
DELETE FROM sidings.directory_doubt d WHERE d.topic = $1 AND d.due_at <= clock_timestamp()
