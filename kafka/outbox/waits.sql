-- Whether messages for these topics wait in these slots. Index: outbox_pkey, up to the first one that is found.
-- $1 slots, $2 topics; NULL: any
SELECT EXISTS (
    SELECT FROM sidings.outbox m WHERE m.slot = ANY ($1::smallint[]) AND ($2::text[] IS NULL OR m.topic = ANY ($2))
) AS waits
