-- The tables of the API: what it knows, to keep addresses unique and to answer.
CREATE SCHEMA IF NOT EXISTS tenants_api;

CREATE TABLE IF NOT EXISTS tenants_api.tenant (
    id              uuid CONSTRAINT tenant_pkey PRIMARY KEY,
    email           text NOT NULL CONSTRAINT tenant_email UNIQUE,
    name            text NOT NULL,
    billing_address text NOT NULL,
    payment_method  text NOT NULL,
    first_email     text NOT NULL,                    -- the one that the id was made from
    first_digest    text NOT NULL,                    -- of the POST that has made it, to know its repetition
    change          uuid NOT NULL,                    -- the latest
    status          text NOT NULL DEFAULT 'pending',  -- of that change
    reason          text,
    created_at      timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS tenant_first_email ON tenants_api.tenant (first_email);

CREATE TABLE IF NOT EXISTS tenants_api.user (
    id           uuid CONSTRAINT user_pkey PRIMARY KEY,
    tenant       uuid NOT NULL CONSTRAINT user_tenant REFERENCES tenants_api.tenant,
    email        text NOT NULL,
    name         text NOT NULL,
    role         text NOT NULL,
    first_digest text NOT NULL,
    CONSTRAINT user_email UNIQUE (tenant, email)
);

-- Requests with an idempotency key, and their answers.
CREATE TABLE IF NOT EXISTS tenants_api.request (
    key     text CONSTRAINT request_pkey PRIMARY KEY,
    digest  text NOT NULL,
    status  integer,
    answer  json,
    entity  uuid,
    made_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS request_made_at ON tenants_api.request (made_at);

-- Events of which the API does not know yet that Kafka has them. A request that concerns the entity waits for them, also
-- when the process that wrote them has died meanwhile.
CREATE TABLE IF NOT EXISTS tenants_api.unacknowledged (
    id      bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT unacknowledged_pkey PRIMARY KEY,
    entity  uuid NOT NULL,
    receipt json NOT NULL
);
CREATE INDEX IF NOT EXISTS unacknowledged_entity ON tenants_api.unacknowledged (entity);
