-- One row per process start; there where an earlier sending has committed although its answer was lost.
-- $1 id, $2 host, $3 pid
INSERT INTO sidings.executor (id, host, pid) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING
