-- A row is kept as the message that it came with, and decoded when it is read: what is read is what was checked at the
-- load, whatever the model's aliases and validators are. `key` is there where it is not the row itself; several rows may
-- have one key. STRICT is left out on purpose: keys are texts, numbers or, for anything else, bytes.
CREATE TABLE IF NOT EXISTS entry (
    row NOT NULL PRIMARY KEY,
    key,
    partition INTEGER NOT NULL,
    "offset" INTEGER NOT NULL,
    timestamp INTEGER NOT NULL,
    message_key BLOB NOT NULL,
    value BLOB NOT NULL,
    headers TEXT
);
CREATE INDEX IF NOT EXISTS entry_key ON entry (key, timestamp, partition, "offset") WHERE key IS NOT NULL;
CREATE TABLE IF NOT EXISTS position (
    partition INTEGER NOT NULL PRIMARY KEY,
    next_offset INTEGER NOT NULL,
    mark_offset INTEGER,
    mark_timestamp INTEGER
);
-- Of the leader that wrote the record at the mark. By itself, so that files of before need not be built anew.
CREATE TABLE IF NOT EXISTS mark_epoch (
    partition INTEGER NOT NULL PRIMARY KEY,
    mark_offset INTEGER NOT NULL,
    epoch INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS note (name TEXT NOT NULL PRIMARY KEY, value NOT NULL);
