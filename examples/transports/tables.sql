-- The service's own table, and what the demo needs for its proof. Sidings' tables live beside them in a schema of
-- their own.

CREATE TABLE transport (
    id                    text PRIMARY KEY,
    destination_latitude  float8 NOT NULL,
    destination_longitude float8 NOT NULL,
    latitude              float8,
    longitude             float8,
    speed_kmh             float8,
    reported_at           timestamptz,
    last_sequence         integer NOT NULL DEFAULT 0,
    messages_seen         integer NOT NULL DEFAULT 0   -- counted in the handler's transaction: must equal what was sent
) WITH (fillfactor = 50);

-- Every run of a handler writes one row when it starts and one when it ends, in autocommit, so that they stay
-- whatever becomes of the process. Only the server's clock stands in `at`: runs on different instances compare.
CREATE TABLE audit (
    at            timestamptz NOT NULL DEFAULT clock_timestamp(),
    event         text NOT NULL CHECK (event IN ('start', 'end')),
    run           text NOT NULL,
    instance      text NOT NULL,
    job_id        bigint,
    attempt       integer,
    transport_id  text NOT NULL,
    sequence      integer NOT NULL,
    outcome       text,
    delay_seconds float8              -- from the sending of the message to the end of the run
);
CREATE INDEX audit_at ON audit (at);

-- What the producer has sent and Kafka has acknowledged; written when it has stopped.
CREATE TABLE produced (
    transport_id text NOT NULL,
    sequence     integer NOT NULL,
    partition    integer NOT NULL,
    sent_at      timestamptz NOT NULL,
    healthy      boolean NOT NULL,    -- whether the carrier answers this transport's calls all the time
    PRIMARY KEY (transport_id, sequence)
);
