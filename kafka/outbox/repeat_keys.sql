-- Publish what a directory table says of these keys now; nothing where the topic is no directory table's.
-- $1 topic, $2 keys
SELECT sidings.directory_repeat($1, $2::bytea[]) AS repeated
