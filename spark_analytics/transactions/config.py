"""What is read, how it is grouped, and where it goes."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import Field

from ...errors import ConfigurationError
from ...settings import Settings

__all__ = ["Config", "Group", "load"]

Name = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0, le=1e10)]  # some 300 years; more, and infinity, is no time of Spark's
DAY = 86_400.0

# Options of Spark's that fields here stand for: given as options too, they would do nothing, or send all to one topic.
_FIELD_OF = {
    "assign": "topics",
    "checkpointlocation": "checkpoint",
    "kafka.bootstrap.servers": "kafka",
    "maxoffsetspertrigger": "max_rows_per_trigger",
    "startingoffsets": "start",
    "subscribe": "topics",
    "subscribepattern": "topics",
    "topic": "groups",
}


class Group(Settings):
    """A table group, the rows of one aggregate root: `Group(name="Customer", key="customer_id", root="Customers", …)`.

    name: begins the names of its events, `CustomerCreated`. key: the column that all its tables have, the root's id.
    root: the table whose inserts and deletes are those of the root. tables: all of them, the root among them; with
    Debezium ``schema.table`` (``database.table`` with MySQL), or only ``table``. topic: of its events.
    primary_keys: by table, the columns that tell rows of one root apart in a snapshot; without, or of a row that lacks
    one of them, only rows that are the same in all columns count as one. The root's need not be given.
    """

    name: Name
    key: Name
    root: Name
    tables: Annotated[tuple[Name, ...], Field(min_length=1)]
    topic: Name
    primary_keys: Mapping[str, tuple[Name, ...]] = {}

    @classmethod
    def title(cls, values: object) -> str:
        """Which of the groups."""
        name = cast(dict[str, object], values).get("name") if isinstance(values, dict) else None
        return f"Group{f' {name!r}' if name else ''} of change-data transactions"

    @classmethod
    def unknown(cls, field: str) -> str:
        """In TOML all that follows `[[groups]]` is the group's."""
        if field in Config.model_fields:
            return "is no field of a group: put it above the first [[groups]]"
        return super().unknown(field)

    def check(self) -> None:
        """The root, and the tables of `primary_keys`, are among its tables."""
        if self.root not in self.tables:
            raise ConfigurationError(
                f"root {self.root!r} is not among the tables of group {self.name!r}: add it to `tables`"
            )
        if strange := sorted(set(self.primary_keys) - set(self.tables)):
            raise ConfigurationError(
                f"primary_keys names {strange[0]!r}, which is not among the tables of group {self.name!r}"
            )

    def primary_key(self, table: str) -> tuple[str, ...]:
        """The columns that tell the rows of one root apart; empty where they are not known."""
        return (self.key,) if table == self.root else self.primary_keys.get(table, ())


class Config(Settings):
    """All that `combine` needs. Times are in seconds.

    kafka: bootstrap servers. topics: of the row changes, all of one database. checkpoint: a folder of this query's
    own, on storage that outlives the machine. alerts: the topic for what needs a person's look.

    form: ``header`` or ``debezium``; the latter with `boundaries`, the topic of BEGIN and END, and `connector`, as
    Debezium calls it in ``source.connector`` (``postgresql``, ``mysql``, …).

    expire_seconds: a transaction that is incomplete for so long is told in the alert topic. forget_seconds: for so
    long after that it may still become complete, and for so long a finished one is remembered, so that its late
    duplicates do not open it again. snapshot_quiet_seconds: a root's snapshot event is sent when for so long no
    further row of it came. snapshot_keep_seconds: its rows are kept for so long after the last one, so that rows of
    a table that is loaded later are sent together with them.

    unknown_tables: what becomes of rows of tables in no group. start: where a topic is read from, if the checkpoint
    does not say. trigger_seconds: between micro-batches; timers go off no finer. max_rows_per_trigger: of one
    micro-batch. state_partitions: of the state, held in the checkpoint from the first start on.
    max_event_bytes: an event that is larger becomes an alert; at most what the topics take. max_transaction_bytes: a
    transaction that is larger is given up, which an alert tells; of its rows as JSON, and 200 for each; at most what a
    worker has memory for. report_seconds: between lines of the log that say how it stands. kafka_options: further ones
    of Spark's Kafka source and sink, such as ``kafka.security.protocol``.
    """

    kafka: Name
    topics: Annotated[tuple[Name, ...], Field(min_length=1)]
    checkpoint: Name
    alerts: Name
    groups: Annotated[tuple[Group, ...], Field(min_length=1)]
    form: Literal["header", "debezium"] = "header"
    boundaries: Name | None = None
    connector: Name | None = None
    expire_seconds: Seconds = 3_600.0
    forget_seconds: Seconds = DAY
    snapshot_quiet_seconds: Seconds = 30.0
    snapshot_keep_seconds: Seconds = DAY
    unknown_tables: Literal["ignore", "alert"] = "ignore"
    start: Literal["earliest", "latest"] = "earliest"
    trigger_seconds: Seconds = 10.0
    max_rows_per_trigger: Annotated[int, Field(gt=0)] = 100_000
    state_partitions: Annotated[int, Field(gt=0)] = 8
    max_event_bytes: Annotated[int, Field(gt=0)] = 1_000_000
    # Its events, in which a row stands twice where it moves, are one table of Spark's, of 2 GB at most.
    max_transaction_bytes: Annotated[int, Field(gt=0, le=1_000_000_000)] = 200_000_000
    report_seconds: Seconds = 60.0
    kafka_options: Annotated[Mapping[str, str], Field(repr=False)] = {}  # they may hold a password

    @classmethod
    def title(cls, values: object) -> str:
        """Of what the configuration is."""
        return "Config of change-data transactions"

    def check(self) -> None:
        """Each table is in one group, nothing is both read and written, and the form has what it needs."""
        owner: dict[str, str] = {}
        for group in self.groups:
            for table in group.tables:
                if table in owner:
                    raise ConfigurationError(
                        f"table {table!r} is in the groups {owner[table]!r} and {group.name!r}: leave it in one of them"
                    )
                owner[table] = group.name
        if len({group.name for group in self.groups}) < len(self.groups):
            raise ConfigurationError(
                "two groups have the same name: names begin the names of events, so they must differ"
            )
        if self.form == "debezium" and not (self.boundaries and self.connector):
            raise ConfigurationError(
                "form 'debezium' needs `boundaries`, the topic of BEGIN and END (<prefix>.transaction), and `connector`"
            )
        if self.form == "header" and (self.boundaries or self.connector):
            raise ConfigurationError(
                "`boundaries` and `connector` are for form 'debezium': set `form`, or leave them out"
            )
        for option in self.kafka_options:
            if field := _FIELD_OF.get(option.lower()):
                raise ConfigurationError(f"kafka_options has {option!r}: that is what the field `{field}` says")
        ours = {group.topic for group in self.groups} | {self.alerts}
        if loop := sorted(ours & set(self.read)):
            raise ConfigurationError(f"{loop[0]!r} is both read and written: it would read its own events")

    @property
    def read(self) -> Sequence[str]:
        """All topics that are read."""
        return [*self.topics, *([self.boundaries] if self.boundaries else [])]

    @cached_property
    def group_of(self) -> Mapping[str, Group]:
        """The group of each table."""
        return {table: group for group in self.groups for table in group.tables}

    @cached_property
    def group_named(self) -> Mapping[str, Group]:
        """The group of each name."""
        return {group.name: group for group in self.groups}


def load(path: Path) -> Config:
    """Read a TOML file with the fields of `Config`, and ``[[groups]]`` with those of `Group`.

    Raises:
        ConfigurationError: There is no such file, it is no TOML, or a field is wrong.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from error
    return Config(**values)
