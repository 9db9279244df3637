-- What support edits. A row that is no longer in force stays, as history; only one row of a terminal is in force.
CREATE TABLE terminal_acquirer (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    terminal_id text NOT NULL,
    acquirer_id text NOT NULL,
    is_active   boolean NOT NULL DEFAULT true
);
CREATE UNIQUE INDEX terminal_acquirer_in_force ON terminal_acquirer (terminal_id) WHERE is_active;
