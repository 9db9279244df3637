-- Move the sequences past the jobs. A logical replication carries rows and no sequences, a restored table neither; new jobs would then
-- stand before old ones, behind the marks, where no read looks. With room to spare: others draw meanwhile, and a sequence that is set
-- to what has been drawn already hands it out again. So one that another executor has just moved on is left alone, too.
-- An id that no sequence comes to is somebody's own: it is not followed.
-- $1 the highest position that was met, $2 the last number that a sequence may come to
SELECT CASE WHEN p.last_value - (NOT p.is_called)::int < $1::bigint THEN setval('sidings.job_position', $1::bigint + 1000000) END AS position,
       CASE WHEN i.last_value - (NOT i.is_called)::int < m.id THEN setval('sidings.job_id_seq', m.id + 1000000) END AS id
FROM sidings.job_position p, sidings.job_id_seq i, (SELECT max(j.id) AS id FROM sidings.job j WHERE j.id <= $2::bigint) m
