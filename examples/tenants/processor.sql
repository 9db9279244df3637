-- The tables of the processor: what it has been told, and what came of it.
CREATE SCHEMA IF NOT EXISTS tenants_processor;

-- One row for each change of a tenant. `key` is stored before the payment provider is called with it.
CREATE TABLE IF NOT EXISTS tenants_processor.registration (
    change   uuid CONSTRAINT registration_pkey PRIMARY KEY,
    tenant   uuid NOT NULL,
    key      uuid NOT NULL DEFAULT gen_random_uuid(),
    outcome  text,              -- registered, declined, closed; null: not known yet
    customer text,
    reason   text
);

-- Transactions of several events of users: the parts that have come so far, stored with their offsets.
CREATE TABLE IF NOT EXISTS tenants_processor.part (
    transaction uuid NOT NULL,
    number      integer NOT NULL,
    "user"      uuid NOT NULL,
    tenant      uuid,           -- null: a tombstone
    CONSTRAINT part_pkey PRIMARY KEY (transaction, number)
);
CREATE TABLE IF NOT EXISTS tenants_processor.complete (
    transaction uuid CONSTRAINT complete_pkey PRIMARY KEY
);
CREATE TABLE IF NOT EXISTS tenants_processor.seat (
    "user" uuid CONSTRAINT seat_pkey PRIMARY KEY,
    tenant uuid NOT NULL
);
CREATE INDEX IF NOT EXISTS seat_tenant ON tenants_processor.seat (tenant);
