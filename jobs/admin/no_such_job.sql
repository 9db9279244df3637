-- Raises. $1 id
SELECT sidings.no_such_job($1)
