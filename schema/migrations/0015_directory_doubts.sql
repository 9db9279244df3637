-- Old messages of a directory table that may yet arrive, behind newer ones, and put right (docs/decisions/0022).

-- Keys of which a message may come late: it was sent by a relay that lost its slot or had no answer. What the table says of them is
-- published again at due_at, more than once, as nobody knows when the late one comes. It stands here and not in the memory of
-- a relay, since what makes messages late also kills relays.
CREATE TABLE sidings.directory_doubt (
    topic  text NOT NULL,
    key    bytea NOT NULL,
    since  timestamptz NOT NULL,
    due_at timestamptz NOT NULL,
    CONSTRAINT directory_doubt_pkey PRIMARY KEY (topic, key)
);
CREATE INDEX directory_doubt_due ON sidings.directory_doubt (topic, due_at);
