"""The errors of Sidings' own, under one root; what else it raises is told below.

::

    SidingsError
    ├── ConfigurationError        a setting, declaration or argument is wrong; the message names it and the remedy
    ├── SchemaError               the database cannot be used as it is
    │   ├── SchemaMissing         no migration has run: call migrate()
    │   ├── SchemaTooOld          migrations are missing: call migrate()
    │   ├── SchemaTooNew          a newer release has migrated this schema, for itself alone: deploy that release
    │   ├── SchemaBusy            others hold locks that migrate() needs: the message names them; call it again
    │   ├── SchemaChanged         an applied migration file has been edited
    │   └── ForeignSchema         the schema belongs to a service of another name
    ├── EnqueueError              a job cannot be stored, or withdrawn; nothing has been written
    │   ├── UnknownJobType        no handler of that name is registered
    │   ├── InvalidPayload        the payload does not fit the type's model
    │   ├── MissingOrigin         no origin was given and none can be derived
    │   ├── MissingGroup          a serial type got no group
    │   └── NotInTransaction      the connection is in autocommit
    ├── ConsumerError             a message cannot be consumed as it is
    │   ├── UndecodableMessage    its value does not fit the model; it is kept as a held job, or a dead letter
    │   ├── UnknownMessageType    its type has no handler, and its topic says unknown="fail"
    │   ├── OffsetOutOfRange      the offset is none of this log: beyond its end, or of a topic that was made anew
    │   └── OffsetUnknown         there is no stored offset, and start="fail" forbids to choose one
    ├── DirectoryError            a directory cannot give what is asked
    │   ├── DirectoryNotReady     it has not applied yet what was in its topic at the start
    │   ├── DirectoryBehind       it has not got so far in the time given
    │   └── StorageError          its store cannot be used: another process has it, or the disk refuses
    ├── AdministrationError       an action of a person was not done; nothing has changed
    │   ├── JobNotFound           there is no such job; the message says how it ended, if that is known
    │   ├── ActionRefused         it makes no sense as asked, or not in the present state of things
    │   └── Busy                  somebody else is changing the same rows: try again
    ├── PostgresUnavailable       no connection, or a call timed out; retried by every loop of ours
    ├── KafkaUnavailable          no broker answers, or not in time; retried by every loop of ours
    ├── Fenced                    for handlers: a receiver has refused `job.fence`, as another executor has the origin
    ├── PublishError              a message of the outbox: `kafka/outbox/errors.py` draws its part of the tree
    └── Discard, Snooze, and what `Retry.after` gives: a handler raises them, to say what becomes of its job; a decoder
        raises Snooze, to have its message wait

Where one of Python's or asyncpg's says it, that is raised: `RuntimeError` (a call that was not awaited), `TimeoutError`
(a wait is over), `ValueError` and `TypeError` (what cannot be such a value), `asyncpg.InFailedSQLTransactionError`. The
docstrings name them.
"""

__all__ = [
    "ActionRefused",
    "AdministrationError",
    "Busy",
    "ConfigurationError",
    "ConsumerError",
    "DirectoryBehind",
    "DirectoryError",
    "DirectoryNotReady",
    "EnqueueError",
    "Fenced",
    "ForeignSchema",
    "InvalidPayload",
    "JobNotFound",
    "KafkaUnavailable",
    "MissingGroup",
    "MissingOrigin",
    "NotInTransaction",
    "OffsetOutOfRange",
    "OffsetUnknown",
    "PostgresUnavailable",
    "SchemaBusy",
    "SchemaChanged",
    "SchemaError",
    "SchemaMissing",
    "SchemaTooNew",
    "SchemaTooOld",
    "SidingsError",
    "StorageError",
    "UndecodableMessage",
    "UnknownJobType",
    "UnknownMessageType",
]


class SidingsError(Exception):
    """The root of all errors that are Sidings' own."""


class ConfigurationError(SidingsError):
    """A setting, a declaration or an argument is wrong; the message names it and the remedy.

    It is raised where the wrong thing is given: at import, at the start, or by a call.
    """


class SchemaError(SidingsError):
    """The database schema cannot be used as it is."""


class SchemaMissing(SchemaError):
    """The schema does not exist. Call ``await migrate(...)`` or run ``python -m sidings.schema``."""


class SchemaTooOld(SchemaError):
    """The schema lacks migrations that this release needs. Call ``migrate``."""


class SchemaTooNew(SchemaError):
    """A newer release has migrated the schema in a way that this one cannot run with. Deploy that release."""


class SchemaBusy(SchemaError):
    """Others hold locks that ``migrate`` needs; the message names them. Nothing has changed: call it again."""


class SchemaChanged(SchemaError):
    """An applied migration differs from the file in this release. Restore the file."""


class ForeignSchema(SchemaError):
    """The schema belongs to a service of another name. Give each service a schema of its own."""


class EnqueueError(SidingsError):
    """A job cannot be stored, or withdrawn. Nothing has been written; the caller's transaction is still usable, unless
    the message says that it has to be rolled back."""


class UnknownJobType(EnqueueError):
    """No job type of that name is registered in this process."""


class InvalidPayload(EnqueueError):
    """The payload does not fit the model of its job type."""


class MissingOrigin(EnqueueError):
    """No origin was given and none can be derived; nothing has been written. Where the message says that the row of a
    home went away meanwhile, the transaction has to be rolled back.

    Outside of a consumer's or job's handler, give ``origin=``. For a type with a home, and in `Service.origin_for`, the
    number of the topic's partitions is not known yet: start a service that consumes the topic, or names it in
    ``topics=``, once while Kafka is up. Beside a consumer of your own neither is possible: insert the topic's row.
    """


class MissingGroup(EnqueueError):
    """A serial job type needs a group, and the payload yields none."""


class NotInTransaction(EnqueueError):
    """The connection is in autocommit, or its transaction has ended; nothing has been written.

    What you store could not commit together with your state change. Store it inside of an open transaction.
    """


class ConsumerError(SidingsError):
    """A message or a partition cannot be consumed as it is."""


class UndecodableMessage(ConsumerError):
    """A message's value does not fit its model, or the decoder refused it, by any error but `Snooze`.

    The message is kept as a held job, or as a dead letter of a stateless consumer.
    """


class UnknownMessageType(ConsumerError):
    """There is no handler for the type of a message, and its topic was declared with ``unknown="fail"``."""


class OffsetOutOfRange(ConsumerError):
    """The stored offset, or one to be reset to, does not belong to this log.

    It lies outside of the log, belongs to a topic that was deleted and made anew, or to a record that cannot be read.
    """


class OffsetUnknown(ConsumerError):
    """No offset is stored for a partition, and its consumer was declared with ``start="fail"``."""


class DirectoryError(SidingsError):
    """A directory cannot give what is asked of it."""


class DirectoryNotReady(DirectoryError):
    """A directory has not applied yet what was in its topic at the start, or its model takes none of its rows. The
    message says how far it is, or what is wrong with them."""


class DirectoryBehind(DirectoryError):
    """A directory has not got as far as asked in the time given. The message says what was missing."""


class StorageError(DirectoryError):
    """A directory's store cannot be used: another process has the file, or the disk refuses."""


class AdministrationError(SidingsError):
    """An action of a person was not done. Nothing has changed."""


class JobNotFound(AdministrationError):
    """There is no such job. If it has ended, the message says how; `Admin.requeue` may bring it back."""


class ActionRefused(AdministrationError):
    """What is asked for makes no sense, or not in the present state of things. The message says what to do instead."""


class Busy(AdministrationError):
    """Somebody else's transaction holds a row that is needed. Try again.

    Of what is done in several transactions (`Admin.each`, `Admin.clear_group`, `Outbox.release`, `Outbox.discard`) a
    part may be done: the message says how much.
    """


class _Unavailable(SidingsError):
    """A server is away. blameless: whether that cannot have come from what was asked of it."""

    blameless: bool

    def __init__(self, *args: object, blameless: bool = False) -> None:
        super().__init__(*args)
        if blameless:  # else as the class has it: one of an author's own may always be
            self.blameless = True


class PostgresUnavailable(_Unavailable):
    """Postgres did not answer in time, or cut the connection. What was sent may have been committed.

    Of a transactional job also: Postgres refuses the job's end, as where a right is missing; nothing is committed then.
    A handler that raises it has not failed, and runs again; but from the third time on where it is not `blameless`
    (docs/policies.md).
    """

    blameless = False
    """Whether it cannot have come from what was asked: there was no connection, the server takes no writes, or it
    refuses the end of a transactional job, whose handler has done its part."""


class KafkaUnavailable(_Unavailable):
    """Kafka cannot be reached, or did not answer in time. What was sent may have arrived.

    What Kafka refuses for good is `InvalidMessage` or `NotPublished`. A handler that raises this has not failed, and
    runs again; but from the third time on where it is not `blameless` (docs/policies.md).
    """

    blameless = False
    """Whether it cannot have come from what was sent, of which nothing has arrived as far as is known: no broker could
    be reached, nobody leads its partitions, or their brokers say that they take nothing at present. Or another message
    has failed, and ended the producer of all."""


class Fenced(SidingsError):
    """Another executor has taken the origin over, and runs its jobs now.

    Sidings itself does not raise it. A handler may, where a receiver has refused its `Job.fence`; the attempt has
    failed then, as by any other error.
    """
