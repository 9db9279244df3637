-- Which of some messages are parked, in their order. $1 topic (null: any), $2 ids
SELECT id FROM sidings.outbox_parked WHERE id = ANY ($2::bigint[]) AND ($1::text IS NULL OR topic = $1) ORDER BY id
