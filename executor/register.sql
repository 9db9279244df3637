-- One row per process start. $1 id, $2 host, $3 pid
INSERT INTO sidings.executor (id, host, pid) VALUES ($1, $2, $3)
