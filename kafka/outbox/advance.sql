-- Move the sequence past the messages; executor/advance.sql has the reasons. $1 the highest id that was met
SELECT CASE WHEN i.last_value - (NOT i.is_called)::int < m.id THEN setval('sidings.outbox_id', m.id + 1000000) END AS id
FROM sidings.outbox_id i, (SELECT greatest($1::bigint, max(p.id)) AS id FROM sidings.outbox_parked p) m
