-- Parked messages are given up for good. $1 topic (null: any), $2 ids (null: all)
DELETE FROM sidings.outbox_parked p WHERE ($1::text IS NULL OR p.topic = $1) AND ($2::bigint[] IS NULL OR p.id = ANY ($2))
RETURNING p.id
