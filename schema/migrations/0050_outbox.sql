-- The outbox: Kafka messages that leave after, and only after, the transaction that stored them has committed.

-- CACHE 1, as for job_position.
CREATE SEQUENCE sidings.outbox_id CACHE 1;

-- The share of the outbox that a message belongs to. One key of one topic is always in one slot, so one relay sends it.
-- Messages without a key share a slot by topic. The hash is the one that hash partitioning uses: stable over releases.
CREATE FUNCTION sidings.outbox_slot(topic text, key bytea) RETURNS smallint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (hashtextextended(encode(coalesce(key, ''), 'hex'), hashtext(topic)) & 15)::smallint;

-- A row is inserted by publish() and deleted when Kafka has acknowledged it; it is never updated.
CREATE TABLE sidings.outbox (
    -- The transaction id is taken before the number, as for job.position: see docs/decisions/0001.
    id            bigint NOT NULL DEFAULT
        CASE WHEN pg_current_xact_id() IS NOT NULL THEN nextval('sidings.outbox_id') END,
    txid          xid8 NOT NULL DEFAULT pg_current_xact_id(),
    published_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    stamped_at    timestamptz,             -- the message's timestamp; null: published_at
    slot          smallint NOT NULL,
    topic         text NOT NULL,
    key           bytea,
    partition_key bytea,                   -- chooses partition and slot in place of the key
    value         bytea,                   -- null: a tombstone
    headers       json,                    -- [[name, text | null | {"base64": …}], …] or {name: text}
    -- The only index: what a relay reads and deletes by. Parked messages leave the table, so that no read passes them.
    CONSTRAINT outbox_pkey PRIMARY KEY (slot, id),
    CONSTRAINT outbox_slot_range CHECK (slot BETWEEN 0 AND 15),
    CONSTRAINT outbox_key_or_value CHECK (key IS NOT NULL OR value IS NOT NULL)
) WITH (
    autovacuum_vacuum_scale_factor = 0,    -- by count: a queue's size says nothing about its churn
    autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_insert_scale_factor = 0,
    autovacuum_vacuum_insert_threshold = 200000,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 50000,
    autovacuum_vacuum_cost_delay = 0
);

-- Messages that Kafka will not take as they are. They wait for a person; `id` is the one they had in the outbox.
CREATE TABLE sidings.outbox_parked (
    id            bigint NOT NULL,
    published_at  timestamptz NOT NULL,
    parked_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    stamped_at    timestamptz,
    slot          smallint NOT NULL,
    topic         text NOT NULL,
    key           bytea,
    partition_key bytea,
    value         bytea,
    headers       json,
    error         text NOT NULL,
    CONSTRAINT outbox_parked_pkey PRIMARY KEY (id)
);
CREATE INDEX outbox_parked_topic ON sidings.outbox_parked (topic, id);

-- The relays that are alive: among them the slots are spread. The lock is not here but in `origin`, rows outbox/0 to
-- outbox/15; a row here only says who counts.
CREATE TABLE sidings.outbox_relay (
    id          uuid NOT NULL,
    alive_until timestamptz NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT now(),
    host        text NOT NULL DEFAULT '',
    pid         integer NOT NULL DEFAULT 0,
    CONSTRAINT outbox_relay_pkey PRIMARY KEY (id)
) WITH (fillfactor = 50, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0);

-- Topics that a relay cannot send to at present. A row goes when a message has arrived again, or with its relay.
CREATE TABLE sidings.outbox_topic (
    topic         text NOT NULL,
    relay         uuid NOT NULL,
    retries       integer NOT NULL,
    failing_since timestamptz NOT NULL DEFAULT clock_timestamp(),
    retry_at      timestamptz NOT NULL,
    error         text NOT NULL,
    CONSTRAINT outbox_topic_pkey PRIMARY KEY (topic, relay),
    CONSTRAINT outbox_topic_relay FOREIGN KEY (relay) REFERENCES sidings.outbox_relay (id) ON DELETE CASCADE
);

-- For SQL, triggers and other languages: the message leaves when the caller's transaction has committed. Returns its id.
--   value   null: a tombstone
CREATE FUNCTION sidings.publish(topic text, key text, value json, headers json DEFAULT NULL) RETURNS bigint
LANGUAGE sql VOLATILE
AS $$
    INSERT INTO sidings.outbox (slot, topic, key, value, headers)
    VALUES (sidings.outbox_slot($1, convert_to($2, 'UTF8')), $1, convert_to($2, 'UTF8'), convert_to($3::text, 'UTF8'), $4)
    RETURNING id
$$;

-- The same with raw bytes.
CREATE FUNCTION sidings.publish_bytes(topic text, key bytea, value bytea, headers json DEFAULT NULL,
                                      partition_key bytea DEFAULT NULL, stamped_at timestamptz DEFAULT NULL)
RETURNS bigint
LANGUAGE sql VOLATILE
AS $$
    INSERT INTO sidings.outbox (slot, topic, key, value, headers, partition_key, stamped_at)
    VALUES (sidings.outbox_slot($1, coalesce($5, $2)), $1, $2, $3, $4, $5, $6)
    RETURNING id
$$;
