"""Payments that go on while Postgres is away: the system of "Kafka as a directory store".

Support edits a table, ``terminal_acquirer``, in Postgres: which bank authorises the payments of which terminal.
Triggers put each change into the outbox, a relay sends it to a compacted topic. The service that routes payments has no
database: it keeps the whole directory in memory, out of the topic, and decides by it. In the story Postgres is killed,
and even the routing service is started anew meanwhile; payments go on. When Postgres is back, so are the edits.

Without a database, a payment that is delivered again is decided again, perhaps by another row. So its authorization may
come twice, with different banks; whoever reads them goes by the first one for a number.

    python -m examples.terminals

Reading order: `tables.sql`, `routing` (the service without a database), `story` (what happens), `stage` (the servers),
`__main__`.
"""
