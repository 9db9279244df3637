-- Days of message ids: made ahead, dropped when they are old. $1 days to keep
SELECT sidings.maintain_seen($1)
