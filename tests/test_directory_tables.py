"""Directory tables: each change of a table becomes the message that services need, whoever writes it and however."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from itertools import count, groupby
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
from pydantic import BaseModel
from sidings.kafka.directory import Directory
from sidings.schema import migrate

from .guide import block, run
from .outbox_support import emptied, records, relaying
from .support import connected, eventually, fetch

PAGE = "directory-tables.md"
SET_UP = "SELECT sidings.directory_table('terminal_acquirer', 'terminals', '{terminal_id}', 'is_active')"
MANY = "INSERT INTO terminal_acquirer (terminal_id, acquirer_id) SELECT 't' || n, 'b' FROM"
OFF = "UPDATE terminal_acquirer SET is_active = false WHERE is_active AND terminal_id = "
INDEX = "CREATE UNIQUE INDEX terminal_acquirer_key ON terminal_acquirer (terminal_id)"

Sent = list[tuple[str, Any]]


@pytest.fixture
async def db(database: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection to a database with the table of the page, which is no directory yet."""
    async with connected(database) as connection:
        await connection.execute(block(PAGE, "The table", "sql"))
        yield connection


@pytest.fixture
async def directory(db: asyncpg.Connection) -> asyncpg.Connection:
    """The same, and the table is a directory."""
    await db.execute(SET_UP)
    return db


async def sent(db: asyncpg.Connection) -> Sent:
    """Key and value of what waits in the outbox, in order, taken out of it."""
    rows = await db.fetch(
        "DELETE FROM sidings.outbox RETURNING id, key, value, slot = sidings.outbox_slot(topic, key) AS in_its_slot"
    )
    assert all(row["in_its_slot"] for row in rows)
    return [
        (row["key"].decode(), None if row["value"] is None else json.loads(row["value"]))
        for row in sorted(rows, key=lambda row: row["id"])
    ]


async def acquirers(db: asyncpg.Connection) -> list[tuple[str, str | None]]:
    """The same, of the value the acquirer alone."""
    return [(key, value and value["acquirer_id"]) for key, value in await sent(db)]


async def insert(db: asyncpg.Connection, *rows: tuple[str, str]) -> None:
    await db.executemany("INSERT INTO terminal_acquirer (terminal_id, acquirer_id) VALUES ($1, $2)", rows)


# -- what is published --------------------------------------------------------------------------------------------


async def test_each_change_publishes_the_row_and_the_end_of_a_row_a_tombstone(directory: asyncpg.Connection):
    await insert(directory, ("t1", "a"))
    [(key, row)] = await sent(directory)
    assert key == "t1"
    assert row == {
        "id": 1, "terminal_id": "t1", "acquirer_id": "a", "is_active": True, "updated_date": row["updated_date"]
    }  # fmt: skip
    assert "T" in row["updated_date"], "ISO 8601"
    await directory.execute("UPDATE terminal_acquirer SET acquirer_id = 'b'")
    await directory.execute(OFF + "'t1'")
    await directory.execute("UPDATE terminal_acquirer SET is_active = true")
    await directory.execute("BEGIN; SAVEPOINT s; UPDATE terminal_acquirer SET acquirer_id = 'c'; RELEASE s; COMMIT")
    assert await acquirers(directory) == [("t1", "b"), ("t1", None), ("t1", "b"), ("t1", "c")]


async def test_a_change_that_is_rolled_back_or_changes_nothing_publishes_nothing(directory: asyncpg.Connection):
    await insert(directory, ("t1", "a"))
    await sent(directory)
    await directory.execute("UPDATE terminal_acquirer SET acquirer_id = acquirer_id")
    await directory.execute("UPDATE terminal_acquirer SET acquirer_id = 'b' WHERE terminal_id = 'none'")
    await directory.execute("BEGIN; SAVEPOINT s; UPDATE terminal_acquirer SET acquirer_id = 'b'; ROLLBACK TO s; COMMIT")
    assert await sent(directory) == []


async def test_rows_that_are_and_stay_inactive_publish_nothing_beside_the_active_one(directory: asyncpg.Connection):
    await insert(directory, ("t1", "old"))
    await directory.execute(OFF + "'t1'")
    await insert(directory, ("t1", "new"))
    await sent(directory)
    await directory.execute("UPDATE terminal_acquirer SET acquirer_id = 'older' WHERE NOT is_active")
    await directory.execute(
        "INSERT INTO terminal_acquirer (terminal_id, acquirer_id, is_active) VALUES ('t1', 'x', false)"
    )
    await directory.execute("DELETE FROM terminal_acquirer WHERE NOT is_active")
    assert await sent(directory) == []


@pytest.mark.parametrize(
    "statements",
    [
        f"BEGIN; {OFF} 't1'; INSERT INTO terminal_acquirer (terminal_id, acquirer_id) VALUES ('t1', 'new'); COMMIT",
        """MERGE INTO terminal_acquirer t USING (VALUES ('t1', 'old'), ('t1', 'new')) v (terminal, acquirer)
           ON t.terminal_id = v.terminal AND t.acquirer_id = v.acquirer WHEN MATCHED THEN UPDATE SET is_active = false
           WHEN NOT MATCHED THEN INSERT (terminal_id, acquirer_id) VALUES (v.terminal, v.acquirer)""",
        """WITH former AS (UPDATE terminal_acquirer SET is_active = false RETURNING terminal_id)
           INSERT INTO terminal_acquirer (terminal_id, acquirer_id) SELECT terminal_id, 'new' FROM former""",
    ],
    ids=["transaction", "merge", "with"],
)
async def test_a_row_that_takes_the_place_of_another_one_comes_last(directory: asyncpg.Connection, statements: str):
    await insert(directory, ("t1", "old"))
    await directory.execute(statements)
    assert (await acquirers(directory))[-1] == ("t1", "new")


async def test_what_a_trigger_of_the_users_makes_of_a_row_comes_last(directory: asyncpg.Connection):
    await directory.execute(
        """CREATE FUNCTION shout() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
               UPDATE terminal_acquirer SET acquirer_id = upper(acquirer_id)
               WHERE id = NEW.id AND acquirer_id <> upper(acquirer_id);
               RETURN NULL;
           END $$;
           CREATE TRIGGER shout AFTER INSERT OR UPDATE ON terminal_acquirer FOR EACH ROW EXECUTE FUNCTION shout()"""
    )
    await insert(directory, ("t1", "a"))
    assert (await acquirers(directory))[-1] == ("t1", "A")
    await directory.execute("UPDATE terminal_acquirer SET acquirer_id = 'b'")
    assert (await acquirers(directory))[-1] == ("t1", "B")


@pytest.mark.parametrize("caught", ["", "EXCEPTION WHEN unique_violation THEN RETURN NULL;"])
async def test_a_successor_that_a_trigger_of_the_users_makes_comes_last(directory: asyncpg.Connection, caught: str):
    """Also where it makes it in a subtransaction, as it does to catch errors."""
    await directory.execute(
        f"""CREATE FUNCTION succeed() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
               INSERT INTO terminal_acquirer (terminal_id, acquirer_id) VALUES (NEW.terminal_id, 'new');
               RETURN NULL;
               {caught}
           END $$;
           CREATE TRIGGER succeed AFTER UPDATE ON terminal_acquirer FOR EACH ROW WHEN (NOT NEW.is_active)
           EXECUTE FUNCTION succeed()"""
    )
    await insert(directory, ("t1", "old"))
    await directory.execute(OFF + "'t1'")
    assert (await acquirers(directory))[-1] == ("t1", "new")


async def test_copy_upserts_and_changes_of_many_rows_publish_one_message_a_row(directory: asyncpg.Connection):
    rows = [(f"t{n}", "a") for n in range(2_000)]
    await directory.copy_records_to_table("terminal_acquirer", records=rows, columns=["terminal_id", "acquirer_id"])
    assert sorted(await acquirers(directory)) == sorted(rows)
    await directory.execute(
        f"""{MANY} generate_series(1000, 2999) n
            ON CONFLICT (terminal_id) WHERE is_active DO UPDATE SET acquirer_id = excluded.acquirer_id"""
    )
    assert sorted(await acquirers(directory)) == sorted((f"t{n}", "b") for n in range(1_000, 3_000))
    await directory.execute("UPDATE terminal_acquirer SET acquirer_id = 'b'")
    assert len(await sent(directory)) == 1_000, "those that were a"
    await directory.execute("UPDATE terminal_acquirer SET is_active = false")
    assert [value for _, value in await sent(directory)] == [None] * 3_000


EXPLAIN = """CREATE TABLE plan (line text);
CREATE FUNCTION explain() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    d sidings.directory;
    line text;
BEGIN
    SELECT * INTO d FROM sidings.directory;
    FOR line IN EXECUTE 'EXPLAIN ' || sidings.directory_statement(d, TG_OP) LOOP
        INSERT INTO plan VALUES (line);
    END LOOP;
    RETURN NULL;
END $$;
CREATE TRIGGER explain AFTER UPDATE ON terminal_acquirer REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
FOR EACH STATEMENT EXECUTE FUNCTION explain()"""


@pytest.mark.parametrize(
    "where", ["", " INCLUDE (id)", " WHERE is_active", " WHERE is_active IS TRUE", " WHERE is_active = true"]
)
async def test_one_edit_of_a_large_table_reads_no_other_row(db: asyncpg.Connection, where: str):
    await db.execute(f"DROP INDEX terminal_acquirer_unique_idx; {INDEX}{where}; {SET_UP}; {EXPLAIN}")
    await db.execute(f"{MANY} generate_series(1, 5000) n; ANALYZE terminal_acquirer")
    await db.execute("UPDATE terminal_acquirer SET acquirer_id = 'b' WHERE id = 7")
    plan = "\n".join(row["line"] for row in await db.fetch("SELECT line FROM plan"))
    assert "Index Scan using terminal_acquirer_key" in plan
    assert "Seq Scan" not in plan


# -- keys and values ----------------------------------------------------------------------------------------------


KEYS_AS_TEXT = {
    "text": ("'ü 1'", "ü 1"),
    "bigint": ("9007199254740993", "9007199254740993"),
    "numeric": ("1.50", "1.50"),
    "uuid": ("'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    "timestamptz": ("'2024-01-01 12:00+02'", "2024-01-01T10:00:00+00:00"),
    "boolean": ("true", "true"),
    "mood": ("'glad'", "glad"),
    "code": ("'DE'", "DE"),
}


async def test_the_key_is_the_text_of_its_column(db: asyncpg.Connection):
    await db.execute("CREATE TYPE mood AS ENUM ('glad'); CREATE DOMAIN code AS varchar(2); SET TimeZone = 'Japan'")
    for kind, (literal, key) in KEYS_AS_TEXT.items():
        await db.execute(f"CREATE TABLE {kind}_thing (k {kind} PRIMARY KEY, v int)")
        await db.execute(f"SELECT sidings.directory_table('{kind}_thing', '{kind}', '{{k}}')")
        await db.execute(f"INSERT INTO {kind}_thing VALUES ({literal}, 1); DELETE FROM {kind}_thing")
        assert [(k, value and value["v"]) for k, value in await sent(db)] == [(key, 1), (key, None)]


async def test_the_key_of_several_columns_is_a_json_array_in_the_order_asked_for(db: asyncpg.Connection):
    await db.execute('CREATE TABLE fare ("From" text, zone int, price numeric, PRIMARY KEY ("From", zone))')
    await db.execute("SELECT sidings.directory_table('fare', 'fares', '{zone,From}')")
    await db.execute("INSERT INTO fare VALUES ('Zürich', 7, 1.20); UPDATE fare SET price = 1.30; DELETE FROM fare")
    key = json.dumps([7, "Zürich"], ensure_ascii=False)
    assert [key for key, _ in await sent(db)] == [key] * 3
    with pytest.raises(asyncpg.RestrictViolationError, match="zone = '7', From = 'Zürich' of a row of fare"):
        await db.execute("INSERT INTO fare VALUES ('Zürich', 7, 1); UPDATE fare SET zone = 8")


async def test_keys_that_are_equal_but_differ_in_their_text_are_two(db: asyncpg.Connection):
    await db.execute("CREATE TABLE rate (k numeric NOT NULL, v int, live boolean NOT NULL DEFAULT true)")
    await db.execute("CREATE UNIQUE INDEX ON rate (k) WHERE live")
    await db.execute("SELECT sidings.directory_table('rate', 'rates', '{k}', 'live'); INSERT INTO rate VALUES (1.0, 1)")
    with pytest.raises(asyncpg.RestrictViolationError):
        await db.execute("UPDATE rate SET k = 1.00")
    await db.execute(
        """MERGE INTO rate USING (VALUES (1), (2)) new (v) ON rate.v = new.v WHEN MATCHED THEN UPDATE SET live = false
           WHEN NOT MATCHED THEN INSERT VALUES (1.00, new.v)"""
    )
    assert [(key, value and value["v"]) for key, value in await sent(db)] == [("1.0", 1), ("1.0", None), ("1.00", 2)]


async def test_a_row_is_the_same_message_whatever_the_settings_of_its_writer(db: asyncpg.Connection):
    await db.execute(
        """CREATE TABLE thing (k text PRIMARY KEY, at timestamptz, span interval, raw bytea, real float8,
                              days daterange);
           SELECT sidings.directory_table('thing', 'things', '{k}')"""
    )
    row = "'2024-01-01 12:00+00', '26 hours', '\\x00ff', 0.1::float8 + 0.2, '[2024-01-02,2024-02-01)'"
    await db.execute(f"INSERT INTO thing VALUES ('plain', {row})")
    await db.execute("SET TimeZone = 'Asia/Tokyo'; SET DateStyle = 'German'; SET IntervalStyle = 'sql_standard'")
    await db.execute("SET bytea_output = 'escape'; SET extra_float_digits = -8")
    await db.execute(f"INSERT INTO thing VALUES ('other', {row})")
    (_, plain), (_, other) = await sent(db)
    assert plain == {
        "k": "plain", "at": "2024-01-01T12:00:00+00:00", "span": "PT26H", "raw": "\\x00ff",
        "real": 0.30000000000000004, "days": "[2024-01-02,2024-02-01)",
    }  # fmt: skip
    assert {**other, "k": "plain"} == plain
    await db.execute("SELECT sidings.directory_republish('thing')")
    assert dict(await sent(db)) == {"plain": plain, "other": other}


async def test_names_in_camel_case_columns_left_out_added_later_and_dropped(db: asyncpg.Connection):
    await db.execute('ALTER TABLE terminal_acquirer ADD address_2_line text, ADD "Secret" text')
    await db.execute(
        """SELECT sidings.directory_table('terminal_acquirer', 'terminals', '{terminal_id}', 'is_active',
                                          left_out => '{Secret,updated_date,is_active}', camel_case => true)"""
    )
    await insert(db, ("t1", "a"))
    await db.execute("UPDATE terminal_acquirer SET \"Secret\" = 'x', updated_date = now()")
    await db.execute("ALTER TABLE terminal_acquirer ADD added_later int DEFAULT 3, DROP address_2_line")
    await db.execute("UPDATE terminal_acquirer SET acquirer_id = 'b'")
    first = {"id": 1, "terminalId": "t1", "acquirerId": "a", "address2Line": None}
    second = {"id": 1, "terminalId": "t1", "acquirerId": "b", "addedLater": 3}
    assert await sent(db) == [("t1", first), ("t1", second)]


async def test_a_turkish_database_has_the_names_of_others_in_camel_case(sidings_postgres: str, empty_database: str):
    """Where the capital of i has a dot, and the small one of I none."""
    name = urlsplit(empty_database).path.removeprefix("/")
    async with connected(sidings_postgres) as admin:
        await admin.execute(f'DROP DATABASE "{name}"')
        try:
            await admin.execute(
                f"""CREATE DATABASE "{name}" TEMPLATE template0 LOCALE 'C' LOCALE_PROVIDER icu ICU_LOCALE 'tr'"""
            )
        except asyncpg.FeatureNotSupportedError:
            pytest.skip("this Postgres is built without ICU; SIDINGS_POSTGRES may name another")
    await migrate(empty_database, service="test")
    async with connected(empty_database) as db:
        named = "SELECT sidings.camel_case(column1) FROM (VALUES ('terminal_id'), ('IS_OPEN_IN'), ('şehir_ılık'))"
        assert [row[0] for row in await db.fetch(f"{named} _")] == ["terminalId", "isOpenIn", "şehirIlık"]


@pytest.mark.parametrize("change", ["ADD acquirer__id text DEFAULT 'x'", "RENAME updated_date TO acquirer__id"])
async def test_a_column_that_gets_the_name_of_another_one_in_camel_case_is_refused(db: asyncpg.Connection, change: str):
    """Its value was published for that of the other one, whose changes were not published any more."""
    set_up = SET_UP.replace("'is_active')", "'is_active', camel_case => true, left_out => '{%s}')")
    await db.execute(set_up % "id")
    await insert(db, ("t1", "a"))
    assert [key for key, _ in await sent(db)] == ["t1"]
    await db.execute(f"ALTER TABLE terminal_acquirer {change}")
    for statement in (
        "UPDATE terminal_acquirer SET acquirer_id = 'b'",
        "SELECT sidings.directory_republish('terminal_acquirer')",
        "SELECT sidings.directory_repeat('terminals', '{t1}')",
    ):
        with pytest.raises(asyncpg.DuplicateColumnError, match="would get the same name"):
            await db.execute(statement)
    assert await sent(db) == []
    await db.execute(set_up % "id,acquirer__id")
    await sent(db)
    await db.execute("UPDATE terminal_acquirer SET acquirer_id = 'b'")
    assert [(key, value["acquirerId"]) for key, value in await sent(db)] == [("t1", "b")]


@pytest.mark.parametrize("change", ["RENAME pin TO pin_code", "DROP pin"])
async def test_a_column_left_out_that_is_renamed_is_not_published_by_its_new_name(db: asyncpg.Connection, change: str):
    await db.execute("ALTER TABLE terminal_acquirer ADD pin text NOT NULL DEFAULT '1234'")
    set_up = SET_UP.replace("'is_active')", "'is_active', left_out => '{%s}')")
    await db.execute(set_up % "updated_date,pin")
    await insert(db, ("t1", "a"))
    first = await sent(db)
    await db.execute(f"ALTER TABLE terminal_acquirer {change}")
    for statement in (
        "UPDATE terminal_acquirer SET acquirer_id = 'b'",
        "INSERT INTO terminal_acquirer (terminal_id, acquirer_id) VALUES ('t2', 'a')",
        "SELECT sidings.directory_republish('terminal_acquirer')",
        "SELECT sidings.directory_repeat('terminals', '{t1}')",
    ):
        with pytest.raises(asyncpg.UndefinedColumnError, match="has no column 'pin' any more") as caught:
            await db.execute(statement)
        assert "Call sidings.directory_table for it again" in (caught.value.hint or "")
    assert await sent(db) == []
    await db.execute(set_up % ("updated_date" if change == "DROP pin" else "updated_date,pin_code"))
    assert await sent(db) == first


@pytest.mark.parametrize("kind", ["STORED", "VIRTUAL"])
async def test_columns_that_are_computed_are_published_and_can_be_the_flag(db: asyncpg.Connection, kind: str):
    """Those of Postgres 18 are virtual unless said otherwise, and no transition table computes them."""
    if kind == "VIRTUAL" and db.get_server_version().major < 18:
        pytest.skip("Postgres 18")
    await db.execute(
        f"""CREATE TABLE fee (id text PRIMARY KEY, net int, "vat%" int GENERATED ALWAYS AS (net % 7) {kind}, ended date,
                is_active boolean NOT NULL GENERATED ALWAYS AS (ended IS NULL) {kind})"""
    )
    await db.execute("SELECT sidings.directory_table('fee', 'fees', '{id}', 'is_active', left_out => '{net,ended}')")
    await db.execute("INSERT INTO fee VALUES ('f', 9)")
    await db.execute("UPDATE fee SET net = 10")
    with pytest.raises(asyncpg.RestrictViolationError):
        await db.execute("DELETE FROM fee")
    await db.execute("UPDATE fee SET ended = '2026-01-01'")
    await db.execute("DELETE FROM fee")
    row = {"id": "f", "is_active": True}
    assert await sent(db) == [("f", row | {"vat%": 2}), ("f", row | {"vat%": 3}), ("f", None)]


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "message", "hint"),
    [
        ("UPDATE terminal_acquirer SET terminal_id = 't9'", "terminal_id = 't1' of a row .* cannot be changed",
         "Make the row inactive (is_active = false), and insert another one."),
        ("DELETE FROM terminal_acquirer", "an active row of terminal_acquirer cannot be deleted: terminal_id = 't1'",
         "Make it inactive first (is_active = false)."),
        ("TRUNCATE terminal_acquirer", "cannot be truncated: services would keep its rows",
         "Make all rows inactive (is_active = false), then use DELETE."),
    ],
)  # fmt: skip
async def test_a_change_that_would_leave_services_with_a_row_that_is_gone_is_refused(
    directory: asyncpg.Connection, statement: str, message: str, hint: str
):
    await insert(directory, ("t1", "a"))
    await sent(directory)
    with pytest.raises(asyncpg.RestrictViolationError, match=message) as refused:
        await directory.execute(statement)
    assert refused.value.hint == hint
    assert await directory.fetchval("SELECT terminal_id FROM terminal_acquirer WHERE is_active") == "t1"
    assert await sent(directory) == []


async def test_a_key_that_a_trigger_of_the_users_changes_is_refused_too(directory: asyncpg.Connection):
    await directory.execute(
        """CREATE FUNCTION other() RETURNS trigger LANGUAGE plpgsql AS
               $$ BEGIN NEW.terminal_id := 't9'; RETURN NEW; END $$;
           CREATE TRIGGER zz_other BEFORE UPDATE ON terminal_acquirer FOR EACH ROW EXECUTE FUNCTION other()"""
    )
    await insert(directory, ("t1", "a"))
    with pytest.raises(asyncpg.RestrictViolationError, match="cannot be changed"):
        await directory.execute("UPDATE terminal_acquirer SET acquirer_id = 'b'")


async def test_without_a_flag_rows_can_be_deleted_and_the_hints_say_so(db: asyncpg.Connection):
    await db.execute(
        "CREATE TABLE thing (k text PRIMARY KEY); SELECT sidings.directory_table('thing', 'things', '{k}')"
    )
    await db.execute("INSERT INTO thing VALUES ('a')")
    for statement, hint in [
        ("UPDATE thing SET k = 'b'", "Delete the row, and insert another one."),
        ("TRUNCATE thing", "Use DELETE."),
    ]:
        with pytest.raises(asyncpg.RestrictViolationError) as refused:
            await db.execute(statement)
        assert refused.value.hint == hint
    await db.execute("DELETE FROM thing")
    assert await sent(db) == [("a", {"k": "a"}), ("a", None)]


REFUSED = [
    ("'nix', 't', '{id}'", "name: there is no table 'nix'", "Check the name"),
    ("NULL, 't', '{id}'", "name: there is no table NULL", "Check the name"),
    ("'seen', 't', '{id}'", "name: seen is no ordinary table", "A view"),
    ("'parted', 't', '{id}'", "name: parted is no ordinary table", "partitions"),
    ("'part', 't', '{id}'", "name: part is no ordinary table", "partitions"),
    ("'parent', 't', '{id}'", "name: parent is no ordinary table", "children"),
    ("'child', 't', '{id}'", "name: child is no ordinary table", "children"),
    ("'brief', 't', '{id}'", "name: brief is temporary or unlogged", "Make it an ordinary table"),
    ("'terminal_acquirer', '', '{id}'", "topic: '' is no name of a topic", "compacted topic"),
    ("'terminal_acquirer', NULL, '{id}'", "topic: NULL is no name", "compacted topic"),
    ("'terminal_acquirer', 'a b', '{id}'", "topic: 'a b' is no name", "letters, digits"),
    ("'terminal_acquirer', '.', '{id}'", "topic: '.' is no name", "letters, digits"),
    ("'terminal_acquirer', '..', '{id}'", "topic: '..' is no name", "letters, digits"),
    ("'terminal_acquirer', repeat('t', 250), '{id}'", "is no name of a topic", "letters, digits"),
    ("'terminal_acquirer', 'taken', '{id}'", "topic: taken is the topic of the table other", "topic of its own"),
    ("'terminal_acquirer', 't', '{}'", "key: {} names no columns", "'{terminal_id}'"),
    ("'terminal_acquirer', 't', NULL", "key: NULL names no columns", "'{terminal_id}'"),
    ("'terminal_acquirer', 't', '{id,NULL}'", "names no columns, or one twice", "'{terminal_id}'"),
    ("'terminal_acquirer', 't', '{id,id}'", "names no columns, or one twice", "'{terminal_id}'"),
    ("'terminal_acquirer', 't', '{terminal}'", "key: terminal_acquirer has no column 'terminal'", "Check the name"),
    ("'terminal_acquirer', 't', '{ctid}'", "key: terminal_acquirer has no column 'ctid'", "Check the name"),
    ("'terminal_acquirer', 't', '{note}'", "key: the column note of terminal_acquirer may be null",
     "ALTER TABLE terminal_acquirer ALTER COLUMN note SET NOT NULL."),
    ("'terminal_acquirer', 't', '{real}'", "key: the column real of terminal_acquirer is of type double", "Give"),
    ("'terminal_acquirer', 't', '{terminal_id}'", "key: terminal_acquirer has no unique index on (terminal_id)",
     "CREATE UNIQUE INDEX ON terminal_acquirer (terminal_id). "),
    ("'terminal_acquirer', 't', '{id,terminal_id}', 'is_active'", "has no unique index on (id, terminal_id)",
     "CREATE UNIQUE INDEX ON terminal_acquirer (id, terminal_id) WHERE is_active. "),
    ("'terminal_acquirer', 't', '{acquirer_id}', 'is_active'", "no unique index on (acquirer_id)", "deferrable"),
    ("'doubled', 't', '{k}'", "no unique index on (k)", "CREATE UNIQUE INDEX"),
    ("'terminal_acquirer', 't', '{id}', 'active'", "active: terminal_acquirer has no column 'active'", "Check"),
    ("'terminal_acquirer', 't', '{id}', 'acquirer_id'", "active: the column acquirer_id of terminal_acquirer is of",
     "Give a boolean"),
    ("'terminal_acquirer', 't', '{id}', 'maybe'", "active: the column maybe of terminal_acquirer may be null",
     "SET NOT NULL"),
    ("'terminal_acquirer', 't', '{id}', left_out => '{nix}'", "left_out: terminal_acquirer has no column 'nix'",
     "Check the name"),
    ("'terminal_acquirer', 't', '{id}', left_out => NULL", "left_out or camel_case is NULL", "Leave the"),
    ("'terminal_acquirer', 't', '{id}', camel_case => true", "two columns of terminal_acquirer would get the same",
     "Leave one of them out"),
]  # fmt: skip


async def test_what_cannot_be_a_directory_is_refused_with_the_argument_and_the_remedy(
    db: asyncpg.Connection,
):
    await db.execute(
        """ALTER TABLE terminal_acquirer ADD note text, ADD maybe boolean, ADD real float8 NOT NULL,
               ADD "Acquirer_ID" text, ADD CONSTRAINT late UNIQUE (acquirer_id) DEFERRABLE;
           CREATE UNIQUE INDEX ON terminal_acquirer (acquirer_id) WHERE NOT is_active;
           CREATE UNIQUE INDEX ON terminal_acquirer (lower(acquirer_id));
           CREATE VIEW seen AS SELECT * FROM terminal_acquirer;
           CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY LIST (id);
           CREATE TABLE part PARTITION OF parted DEFAULT;
           CREATE TABLE parent (id int PRIMARY KEY); CREATE TABLE child () INHERITS (parent);
           CREATE UNLOGGED TABLE brief (id int PRIMARY KEY);
           CREATE TABLE other (id int PRIMARY KEY); SELECT sidings.directory_table('other', 'taken', '{id}')"""
    )
    await db.execute("CREATE TABLE doubled (k int NOT NULL); INSERT INTO doubled VALUES (1), (1)")
    with pytest.raises(asyncpg.UniqueViolationError):
        await db.execute("CREATE UNIQUE INDEX CONCURRENTLY ON doubled (k)")  # leaves an index that is not valid
    for arguments, message, hint in REFUSED:
        with pytest.raises(asyncpg.InvalidParameterValueError) as refused:
            await db.execute(f"SELECT sidings.directory_table({arguments})")
        assert message in str(refused.value)
        assert hint in (refused.value.hint or "")


# -- setting up, again, and taking down ---------------------------------------------------------------------------


async def test_setting_up_publishes_the_active_rows_that_are_there_unless_told_not_to(db: asyncpg.Connection):
    await insert(db, ("t1", "a"), ("t2", "b"))
    await db.execute(OFF + "'t2'")
    assert await db.fetchval(SET_UP) == 1
    assert await acquirers(db) == [("t1", "a")]
    assert await db.fetchval(SET_UP) == 0, "the same once more is nothing"
    await db.execute("SELECT sidings.directory_remove('terminal_acquirer')")
    assert await db.fetchval(SET_UP.replace("'is_active'", "'is_active', publish => false")) == 0
    assert await sent(db) == []


async def test_other_arguments_replace_the_former_ones(directory: asyncpg.Connection):
    await insert(directory, ("t1", "a"))
    await sent(directory)
    assert await directory.fetchval(SET_UP.replace("'terminals'", "'elsewhere'")) == 1
    await directory.execute("UPDATE terminal_acquirer SET acquirer_id = 'b'")
    topics = await directory.fetch("SELECT topic FROM sidings.outbox")
    assert [row["topic"] for row in topics] == ["elsewhere"] * 2
    with pytest.raises(asyncpg.InvalidParameterValueError, match=r"topic: elsewhere has messages .* by another key"):
        await directory.execute(SET_UP.replace("'terminals', '{terminal_id}'", "'elsewhere', '{id}'"))
    with pytest.raises(asyncpg.InvalidParameterValueError, match="with another flag"):
        await directory.execute(
            f"{INDEX}; SELECT sidings.directory_table('terminal_acquirer', 'elsewhere', '{{terminal_id}}')"
        )


@pytest.mark.parametrize(
    "change",
    [
        "DROP TRIGGER sidings_publish_insert ON terminal_acquirer",
        "ALTER TABLE terminal_acquirer DISABLE TRIGGER sidings_publish_insert",
    ],
)
async def test_setting_up_again_brings_back_triggers_that_somebody_has_dropped_or_disabled(
    directory: asyncpg.Connection, change: str
):
    await directory.execute(change)
    await insert(directory, ("t1", "a"))
    assert await directory.fetchval(SET_UP) == 1
    await insert(directory, ("t2", "b"))
    assert await acquirers(directory) == [("t1", "a"), ("t2", "b")]


async def test_the_topic_of_a_table_that_was_dropped_is_free(directory: asyncpg.Connection):
    await directory.execute("DROP TABLE terminal_acquirer; CREATE TABLE thing (k text PRIMARY KEY)")
    await directory.execute("SELECT sidings.directory_table('thing', 'terminals', '{k}')")


async def test_after_a_change_of_the_keys_texts_the_topic_has_those_alone_that_the_table_has(db: asyncpg.Connection):
    """In the topic of before, the former key stayed for ever: services went on finding a row that was switched off."""
    await db.execute(block(PAGE, "Quickstart", "sql"))
    await insert(db, ("007", "a"), ("8", "b"))
    await db.execute(block(PAGE, "Changing the table", "sql"))
    await db.execute("UPDATE terminal_acquirer SET is_active = false WHERE terminal_id = 7")
    its_topic = await db.fetchval("SELECT topic FROM sidings.directory")
    await db.execute("DELETE FROM sidings.outbox WHERE topic <> $1", its_topic)
    assert {key for key, row in dict(await sent(db)).items() if row is not None} == {"8"}


async def test_a_table_that_is_no_directory_any_more_publishes_and_refuses_nothing(directory: asyncpg.Connection):
    await insert(directory, ("t1", "a"))
    await sent(directory)
    await directory.execute(
        """CREATE TRIGGER unchanged BEFORE UPDATE ON terminal_acquirer FOR EACH ROW
           EXECUTE FUNCTION suppress_redundant_updates_trigger()"""
    )
    await directory.execute("SELECT sidings.directory_remove('terminal_acquirer')")
    triggers = await directory.fetch("SELECT tgname FROM pg_trigger WHERE tgrelid = 'terminal_acquirer'::regclass")
    assert [row["tgname"] for row in triggers] == ["unchanged"], "those of others stay"
    await directory.execute("UPDATE terminal_acquirer SET terminal_id = 't2'; DELETE FROM terminal_acquirer")
    await directory.execute("TRUNCATE terminal_acquirer")
    assert await sent(directory) == []
    with pytest.raises(asyncpg.InvalidParameterValueError, match="terminal_acquirer is no directory table"):
        await directory.execute("SELECT sidings.directory_republish('terminal_acquirer')")


async def test_what_fired_no_trigger_is_published_by_republishing(directory: asyncpg.Connection):
    await directory.execute("SET session_replication_role = replica")
    await insert(directory, ("t1", "a"), ("t2", "b"))
    await directory.execute(OFF + "'t2'")
    await directory.execute("SET session_replication_role = origin")
    assert await sent(directory) == []
    assert await directory.fetchval("SELECT sidings.directory_republish('terminal_acquirer')") == 1
    assert await acquirers(directory) == [("t1", "a")]


async def test_triggers_of_a_table_that_is_not_registered_say_what_to_do(directory: asyncpg.Connection):
    await directory.execute("DELETE FROM sidings.directory")
    with pytest.raises(
        asyncpg.ObjectNotInPrerequisiteStateError, match="has the triggers of a directory table"
    ) as refused:
        await insert(directory, ("t1", "a"))
    assert "sidings.directory_remove" in (refused.value.hint or "")


async def test_setting_up_needs_fresh_snapshots(db: asyncpg.Connection):
    for call in (SET_UP, "SELECT sidings.directory_republish('terminal_acquirer')"):
        with pytest.raises(asyncpg.PostgresError, match="needs the isolation level READ COMMITTED") as refused:
            await db.execute(f"BEGIN ISOLATION LEVEL REPEATABLE READ; {call}")
        assert refused.value.sqlstate == "SD004"
        await db.execute("ROLLBACK")


async def test_a_directory_works_in_a_schema_of_another_name(empty_database: str):
    name = "x" * 48  # the longest: names of triggers have to fit
    await migrate(empty_database, service="freight", schema=name)
    async with connected(empty_database) as db:
        await db.execute("CREATE DOMAIN flag AS boolean; CREATE TABLE thing (k text PRIMARY KEY, on_now flag NOT NULL)")
        await db.execute(f"SELECT {name}.directory_table('thing', 'things', '{{k}}', 'on_now')")
        await db.execute("INSERT INTO thing VALUES ('a', true); UPDATE thing SET on_now = false; DELETE FROM thing")
        assert await db.fetchval(f"SELECT count(*) FROM {name}.outbox") == 2


# -- rights -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def role(db: asyncpg.Connection) -> AsyncIterator[str]:
    """A role without any rights, of this test alone."""
    name = f"editor_{await db.fetchval('SELECT current_database()')}"[:60]
    await db.execute(f'CREATE ROLE "{name}"')
    yield f'"{name}"'
    await db.execute(
        f'RESET ROLE; REASSIGN OWNED BY "{name}" TO CURRENT_USER; DROP OWNED BY "{name}"; DROP ROLE "{name}"'
    )


async def test_who_maintains_the_table_needs_no_rights_but_those_on_the_table(directory: asyncpg.Connection, role: str):
    await directory.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON terminal_acquirer TO {role}; SET ROLE {role}")
    await insert(directory, ("t1", "a"))
    await directory.execute("UPDATE terminal_acquirer SET acquirer_id = 'b'")
    await directory.execute(OFF + "'t1'; DELETE FROM terminal_acquirer")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await sent(directory)
    await directory.execute("RESET ROLE")
    assert await acquirers(directory) == [("t1", "a"), ("t1", "b"), ("t1", None)]


async def test_a_member_of_the_role_that_owns_the_schema_sets_its_own_table_up(db: asyncpg.Connection, role: str):
    service = role.replace("editor", "service")
    await db.execute(
        f"""CREATE ROLE {service}; GRANT {service} TO {role};
            ALTER FUNCTION sidings.directory_publish() OWNER TO {service};
            GRANT ALL ON SCHEMA sidings TO {service}; GRANT ALL ON ALL TABLES IN SCHEMA sidings TO {service};
            GRANT ALL ON ALL SEQUENCES IN SCHEMA sidings TO {service};
            GRANT SELECT ON terminal_acquirer TO {service}; ALTER TABLE terminal_acquirer OWNER TO {role}"""
    )
    try:
        await insert(db, ("t1", "a"))
        await db.execute(f"SET ROLE {role}")
        assert await db.fetchval(SET_UP) == 1
        await db.execute("SELECT sidings.directory_republish('terminal_acquirer')")
        await insert(db, ("t2", "b"))
        await db.execute("SELECT sidings.directory_remove('terminal_acquirer')")
        await db.execute("RESET ROLE")
        assert await acquirers(db) == [("t1", "a"), ("t1", "a"), ("t2", "b")]
    finally:
        await db.execute(
            f"""RESET ROLE; ALTER FUNCTION sidings.directory_publish() OWNER TO CURRENT_USER; DROP OWNED BY {service};
                DROP ROLE {service}"""
        )


CODE = """$$ BEGIN
    IF current_user LIKE 'editor%' THEN RETURN {0}; END IF;
    RAISE EXCEPTION 'runs as %', current_user;
END $$"""


async def refused(db: asyncpg.Connection, role: str, what: str, remedy: str) -> None:
    """Neither a change of the table is taken, nor all that sets up or publishes."""
    for call in (
        f"SET ROLE {role}; INSERT INTO terminal_acquirer (terminal_id, acquirer_id) VALUES ('t2', 'b')",
        "SELECT sidings.directory_republish('terminal_acquirer')",
        "SELECT sidings.directory_repeat('terminals', '{t1}')",
        "SELECT sidings.directory_remove('terminal_acquirer'); " + SET_UP,
        "SELECT sidings.directory_remove('terminal_acquirer'); " + SET_UP.replace(")", ", publish => false)"),
    ):
        with pytest.raises(asyncpg.InvalidParameterValueError) as told:
            await db.execute(call)
        message, hint = (text.replace("public.", "") for text in (told.value.args[0], told.value.hint or ""))
        assert message.startswith(f"name: the {what} belongs to {role[1:-1]}, whose code would run with")
        assert hint.startswith(remedy)
        assert hint.endswith("docs/directory-tables.md has a way for schemas of superusers.")
    assert await sent(db) == []


@pytest.mark.parametrize(
    ("what", "statement"),
    [
        ("statistics", "CREATE STATISTICS other.s ON (other.code(1)), terminal_id FROM terminal_acquirer"),
        ("an index", "CREATE INDEX ON terminal_acquirer (acquirer_id) WHERE other.code(1) = 1"),
        (
            "an index",
            """CREATE OPERATOR other.## (FUNCTION = other.code, RIGHTARG = int);
               CREATE INDEX ON terminal_acquirer (acquirer_id) WHERE (OPERATOR(other.##) 1) = 1""",
        ),
        ("a constraint", "ALTER TABLE terminal_acquirer ADD CHECK (other.code(1) = 1)"),
    ],
)
async def test_code_of_who_owns_the_table_does_not_run_with_the_rights_of_the_triggers(
    directory: asyncpg.Connection, role: str, what: str, statement: str
):
    """What he asks of constants was worked out when the triggers' query was planned."""
    await directory.execute(
        f"""CREATE SCHEMA other AUTHORIZATION {role}; GRANT CREATE ON SCHEMA public TO {role};
            ALTER TABLE terminal_acquirer OWNER TO {role}; SET ROLE {role};
            CREATE FUNCTION other.code(int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS {CODE.format("1")};
            {statement}; RESET ROLE; SET constraint_exclusion = on"""
    )
    await refused(directory, role, "table terminal_acquirer", "ALTER TABLE terminal_acquirer OWNER TO postgres (to")
    await directory.execute(
        f"ALTER TABLE terminal_acquirer OWNER TO CURRENT_USER; GRANT INSERT ON terminal_acquirer TO {role}"
    )
    function = f"function other.code(integer), of {what} of terminal_acquirer,"
    await refused(directory, role, function, "ALTER FUNCTION other.code(integer) OWNER TO postgres, or drop")
    await directory.execute("DROP FUNCTION other.code CASCADE")
    await insert(directory, ("t2", "b"))
    assert await acquirers(directory) == [("t2", "b")]


@pytest.mark.parametrize(
    ("column", "its_type", "there"),
    [
        ("kind", "kind", "a"),
        ("kind[]", "kind", "{a}"),
        ("named", "kind", "a"),
        ("named[]", "kind", "{a}"),
        ("pair", "kind", "(1,a)"),
        ("pair[]", "kind", '{"(1,a)"}'),
        ("span", "span", "[1,2]"),
    ],
)
async def test_code_of_who_owns_the_type_of_a_column_does_not_run_with_the_rights_of_the_triggers(
    directory: asyncpg.Connection, role: str, column: str, its_type: str, there: str
):
    """The cast of a type to json was called."""
    await directory.execute(
        f"""CREATE SCHEMA other; GRANT ALL ON SCHEMA other TO {role}; SET ROLE {role};
            CREATE TYPE other.kind AS ENUM ('a'); CREATE DOMAIN other.named AS other.kind;
            CREATE TYPE other.span AS RANGE (subtype = int);
            CREATE FUNCTION other.code(other.{its_type}) RETURNS json LANGUAGE plpgsql AS {CODE.format("to_json(1)")};
            CREATE CAST (other.{its_type} AS json) WITH FUNCTION other.code(other.{its_type});
            RESET ROLE; GRANT INSERT ON terminal_acquirer TO {role}; CREATE TYPE other.pair AS (n int, k other.kind);
            ALTER TABLE terminal_acquirer ADD what other.{column} DEFAULT '{there}'"""
    )
    kind = f"type other.{its_type}, of the column what of terminal_acquirer,"
    await refused(directory, role, kind, f"ALTER TYPE other.{its_type} OWNER TO postgres, or leave the column out")
    await directory.execute(f"ALTER TYPE other.{its_type} OWNER TO CURRENT_USER")
    function = f"function other.code(other.{its_type}), of the column what of terminal_acquirer,"
    await refused(directory, role, function, f"ALTER FUNCTION other.code(other.{its_type}) OWNER TO postgres, or drop")
    await directory.execute(f"ALTER TYPE other.{its_type} OWNER TO {role}; {SET_UP[:-1]}, left_out => '{{what}}')")
    await insert(directory, ("t2", "b"))
    assert await acquirers(directory) == [("t2", "b")]


async def test_code_of_who_owns_the_type_of_a_key_that_is_left_out_does_not_run_with_the_rights_of_the_triggers(
    db: asyncpg.Connection, role: str
):
    """It is in no message, and yet made JSON: for the key of each."""
    await db.execute(
        f"""CREATE TYPE kind AS ENUM ('a'); ALTER TYPE kind OWNER TO {role};
            CREATE TABLE thing (k kind PRIMARY KEY, v int)"""
    )
    with pytest.raises(asyncpg.InvalidParameterValueError, match="the type kind, of the column k of thing, belongs to"):
        await db.execute("SELECT sidings.directory_table('thing', 'things', '{k}', left_out => '{k}')")


async def test_code_of_who_owns_a_child_of_the_table_does_not_run_with_the_rights_of_the_triggers(
    directory: asyncpg.Connection, role: str
):
    """The table's owner has made it after the set-up, and has given it away."""
    await directory.execute(
        f"""CREATE SCHEMA other AUTHORIZATION {role}; CREATE TABLE other.child () INHERITS (terminal_acquirer);
            CREATE TABLE other.grandchild () INHERITS (other.child); ALTER TABLE other.grandchild OWNER TO {role};
            SET ROLE {role};
            CREATE FUNCTION other.code(int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS {CODE.format("1")};
            CREATE STATISTICS other.s ON (other.code(1)), terminal_id FROM other.grandchild; RESET ROLE"""
    )
    told, remedy = "{} other.{}, {} of terminal_acquirer,", "ALTER {} other.{} OWNER TO postgres"
    insertion = "INSERT INTO terminal_acquirer (terminal_id, acquirer_id) VALUES ('t2', 'b')"
    for kind, name, what in (("table", "grandchild", "a child"), ("function", "code(integer)", "of statistics")):
        with pytest.raises(asyncpg.InvalidParameterValueError) as refusal:
            await directory.execute(insertion)
        message, hint = (text.replace("public.", "") for text in (refusal.value.args[0], refusal.value.hint or ""))
        assert message.startswith(f"name: the {told.format(kind, name, what)} belongs to {role[1:-1]}")
        assert hint.startswith(remedy.format(kind.upper(), name))
        await directory.execute(remedy.format("TABLE", "grandchild"))
    await directory.execute(remedy.format("FUNCTION", "code(integer)") + "; DROP FUNCTION other.code CASCADE")
    await directory.execute(insertion)
    assert await acquirers(directory) == [("t2", "b")]


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("ALTER TABLE terminal_acquirer OWNER TO {role}", "CREATE STATISTICS other.s ON (other.code(1)), id FROM {0}"),
        (
            "ALTER TABLE other.child OWNER TO {role}",
            "CREATE STATISTICS other.s ON (other.code(1)), id FROM other.child",
        ),
        (
            "ALTER TYPE other.what OWNER TO {role}",
            """CREATE FUNCTION other.told(other.what) RETURNS json LANGUAGE sql AS $$ SELECT to_json(other.code(1)) $$;
               CREATE CAST (other.what AS json) WITH FUNCTION other.told""",
        ),
        ("ALTER TYPE other.pair ADD ATTRIBUTE his other.his", ""),
    ],
    ids=["table", "child", "type", "attribute"],
)
async def test_code_of_a_new_owner_does_not_run_for_who_sees_the_former_one(
    database: str, db: asyncpg.Connection, role: str, given: str, made: str
):
    """He began a transaction before, and wrote the table in it: the owner of before was looked at."""
    await db.execute(
        f"""CREATE SCHEMA other; GRANT ALL ON SCHEMA other, public TO {role}; CREATE TYPE other.what AS ENUM ('x');
            CREATE TYPE other.his AS ENUM ('x'); ALTER TYPE other.his OWNER TO {role};
            CREATE DOMAIN other.named AS other.what; CREATE TYPE other.pair AS (n int, name other.named);
            ALTER TABLE terminal_acquirer ADD pairs other.pair[] DEFAULT '{{"(1,x)"}}';
            {SET_UP}; GRANT ALL ON terminal_acquirer TO {role}; GRANT USAGE ON SCHEMA sidings TO {role};
            GRANT SELECT ON sidings.directory TO {role}"""
    )
    if "child" in given:  # one that is there leaves no trace of others
        await db.execute("CREATE TABLE other.first () INHERITS (terminal_acquirer)")
    async with connected(database) as other:
        await other.execute(f"SET ROLE {role}")
        async with db.transaction():  # which was under way when the other one began, and was not the last to begin
            await db.execute("SELECT pg_current_xact_id()")
            await fetch(database, "SELECT pg_current_xact_id()")
            await begun(other, "repeatable_read")
            if "child" in given:
                await db.execute("CREATE TABLE other.child () INHERITS (terminal_acquirer)")
            await db.execute(
                f"""{given.format(role=role)}; SET ROLE {role};
                    CREATE FUNCTION other.code(int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS {CODE.format("1")};
                    {made.format("terminal_acquirer")}; RESET ROLE"""
            )
        with pytest.raises((asyncpg.SerializationError, asyncpg.FeatureNotSupportedError)):
            await insert(other, ("t1", "a"))
    await db.execute("DROP SCHEMA other CASCADE; ANALYZE terminal_acquirer")
    async with db.transaction(isolation="repeatable_read"):
        await db.execute("DROP STATISTICS IF EXISTS s; ALTER TABLE terminal_acquirer OWNER TO CURRENT_USER")
        await insert(db, ("t1", "a"))


async def test_the_remedy_for_the_type_of_a_column_is_what_postgres_takes(directory: asyncpg.Connection, role: str):
    """The type of a table's rows has its table's owner, and a multirange its range's, from Postgres 17 on; before, the
    column has to be left out."""
    if directory.get_server_version().major < 17:
        pytest.skip("before Postgres 17 a multirange cannot change hands")
    await directory.execute(
        f"""CREATE SCHEMA other; GRANT ALL ON SCHEMA other TO {role}; SET ROLE {role};
            CREATE TABLE other.place (name text); CREATE TYPE other.span AS RANGE (subtype = int); RESET ROLE;
            ALTER TABLE terminal_acquirer ADD place other.place, ADD spans other.span_multirange"""
    )
    for _ in range(2):
        with pytest.raises(asyncpg.InvalidParameterValueError) as refusal:
            await insert(directory, ("t1", "a"))
        remedy, comma, other = (refusal.value.hint or "").partition(", ")
        assert comma
        assert other.startswith("or leave the column out (left_out)")
        await directory.execute(remedy)
    await insert(directory, ("t1", "a"))


async def test_a_member_in_name_only_of_the_role_that_owns_the_schema_owns_no_directory(
    db: asyncpg.Connection, role: str
):
    """From Postgres 16 on: it neither has nor can take that role's rights."""
    if db.get_server_version().major < 16:
        pytest.skip("before Postgres 16 each member may SET ROLE")
    service = role.replace("editor", "service")
    await db.execute(
        f"""CREATE ROLE {service}; GRANT {service} TO {role} WITH INHERIT FALSE, SET FALSE;
            ALTER FUNCTION sidings.directory_publish() OWNER TO {service};
            GRANT SELECT ON terminal_acquirer TO {service}; ALTER TABLE terminal_acquirer OWNER TO {role}"""
    )
    try:
        with pytest.raises(asyncpg.InvalidParameterValueError, match="belongs to editor") as refusal:
            await db.fetchval(SET_UP)
        assert f"or GRANT {service[1:-1]} TO {role[1:-1]}, who may" in (refusal.value.hint or "").replace('"', "")
        for may in ("INHERIT TRUE, SET FALSE", "INHERIT FALSE, SET TRUE", "INHERIT FALSE, SET FALSE, ADMIN TRUE"):
            await db.execute(f"GRANT {service} TO {role} WITH {may}")
            await db.fetchval(SET_UP)
            await db.execute("SELECT sidings.directory_remove('terminal_acquirer')")
    finally:
        await db.execute(
            f"""ALTER FUNCTION sidings.directory_publish() OWNER TO CURRENT_USER; DROP OWNED BY {service};
                DROP ROLE {service}"""
        )


async def test_where_a_superuser_owns_the_schema_the_triggers_work_with_the_rights_of_who_owns_the_table(
    db: asyncpg.Connection, role: str
):
    await db.execute(f"ALTER TABLE terminal_acquirer OWNER TO {role}")
    with pytest.raises(asyncpg.InvalidParameterValueError, match="belongs to editor"):
        await db.fetchval(SET_UP)
    await db.execute(block(PAGE, "Rights", "sql").replace("maintainer", role))
    await insert(db, ("t1", "a"))
    assert await db.fetchval(SET_UP) == 1
    await db.execute(f"SET ROLE {role}")
    await insert(db, ("t2", "b"))
    await db.execute("RESET ROLE; ALTER FUNCTION sidings.directory_publish() OWNER TO CURRENT_USER")
    assert await acquirers(db) == [("t1", "a"), ("t2", "b")]


async def test_a_table_that_the_triggers_may_not_read_is_refused(db: asyncpg.Connection, role: str):
    await db.execute(f"ALTER FUNCTION sidings.directory_publish() OWNER TO {role}")
    with pytest.raises(asyncpg.InvalidParameterValueError, match="owner of the schema sidings may not read") as refused:
        await db.execute(SET_UP)
    assert (refused.value.hint or "").startswith("GRANT SELECT ON terminal_acquirer TO editor")
    await db.execute(
        f"""CREATE SCHEMA private; ALTER TABLE terminal_acquirer SET SCHEMA private;
            GRANT SELECT ON private.terminal_acquirer TO {role}"""
    )
    with pytest.raises(asyncpg.InvalidParameterValueError, match=r"may not read private\.terminal_acquirer"):
        await db.execute(SET_UP.replace("'terminal_acquirer'", "'private.terminal_acquirer'"))


async def test_rows_that_a_policy_hides_from_the_triggers_are_an_error_and_no_tombstone(
    directory: asyncpg.Connection, role: str
):
    await directory.execute(
        f"""ALTER FUNCTION sidings.directory_publish() OWNER TO {role};
            GRANT SELECT ON terminal_acquirer, sidings.directory TO {role}; GRANT USAGE ON SCHEMA sidings TO {role};
            GRANT INSERT ON sidings.outbox TO {role}; ALTER TABLE terminal_acquirer ENABLE ROW LEVEL SECURITY"""
    )
    with pytest.raises(asyncpg.InsufficientPrivilegeError, match="row-level security policy"):
        await insert(directory, ("t1", "a"))
    await directory.execute(
        f"""GRANT ALL ON terminal_acquirer TO {role}; GRANT USAGE ON SEQUENCE sidings.outbox_id TO {role};
            SET ROLE {role}"""
    )
    for call in ("republish('terminal_acquirer')", "repeat('terminals', '{t1}')"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="row-level security policy"):
            await directory.execute(f"SELECT sidings.directory_{call}")


async def test_what_a_writer_puts_before_the_systems_own_names_does_not_reach_the_triggers(
    directory: asyncpg.Connection, role: str
):
    """They work with the rights of the schema's owner, which nobody may borrow."""
    await directory.execute(
        f"""GRANT SELECT, INSERT ON terminal_acquirer TO {role}; CREATE SCHEMA evil AUTHORIZATION {role};
            SET ROLE {role};
            CREATE FUNCTION evil.convert_to(text, name) RETURNS bytea LANGUAGE plpgsql AS
                $$ BEGIN RAISE EXCEPTION 'as %', current_user; END $$;
            CREATE TEMP TABLE pg_attribute AS
                SELECT attrelid, attnum, attname, attisdropped FROM pg_catalog.pg_attribute LIMIT 0;
            SET search_path = evil, pg_temp, pg_catalog, public"""
    )
    await insert(directory, ("t1", "a"))
    await directory.execute("RESET ROLE; RESET search_path")
    assert await acquirers(directory) == [("t1", "a")]


# -- several at once ------------------------------------------------------------------------------------------------


async def test_who_has_to_wait_for_writers_too_long_is_refused(database: str, directory: asyncpg.Connection):
    """A set-up that waits for a lock keeps all who come after it waiting, too."""
    async with directory.transaction():
        await insert(directory, ("t1", "a"))
        calls = (
            SET_UP,
            "SELECT sidings.directory_republish('terminal_acquirer')",
            "SELECT sidings.directory_repeat('terminals', '{t1}')",
            "SELECT sidings.directory_remove('terminal_acquirer')",
        )

        async def refused(call: str) -> None:
            async with connected(database) as other:
                with pytest.raises(asyncpg.LockNotAvailableError):
                    await other.execute(call, timeout=25)

        await asyncio.gather(*map(refused, calls))


async def test_instances_that_set_up_at_once_do_it_once(database: str, db: asyncpg.Connection):
    await insert(db, ("t1", "a"))

    async def set_up() -> int:
        async with connected(database) as other:
            return await other.fetchval(SET_UP)

    assert sorted(await asyncio.gather(*(set_up() for _ in range(8)))) == [0] * 7 + [1]


async def test_of_two_tables_that_are_set_up_at_once_one_gets_the_topic(database: str, directory: asyncpg.Connection):
    await directory.execute("CREATE TABLE one (k text PRIMARY KEY); CREATE TABLE two (k text PRIMARY KEY)")
    async with connected(database) as other, connected(database) as third:
        async with directory.transaction():
            await directory.execute("SELECT sidings.directory_table('one', 'both', '{k}')")
            waiting = asyncio.create_task(other.execute("SELECT sidings.directory_table('two', 'both', '{k}')"))
            await blocked(third, other.get_server_pid())
        with pytest.raises(asyncpg.UniqueViolationError, match="directory_topic"):
            await waiting


# -- order --------------------------------------------------------------------------------------------------------


async def blocked(db: asyncpg.Connection, pid: int) -> None:
    """Wait until that backend waits for a lock."""

    async def waits() -> bool:
        return await db.fetchval("SELECT cardinality(pg_blocking_pids($1)) > 0", pid)

    await eventually(waits, "the other connection waits for a lock")


async def test_a_row_that_waits_for_the_end_of_its_predecessor_is_published_after_it(
    database: str, directory: asyncpg.Connection
):
    await insert(directory, ("t1", "old"))
    await sent(directory)
    async with connected(database) as other, connected(database) as third:
        async with directory.transaction():
            await directory.execute(OFF + "'t1'")
            waiting = asyncio.create_task(insert(other, ("t1", "new")))
            await blocked(third, other.get_server_pid())
        await waiting
    assert await acquirers(directory) == [("t1", None), ("t1", "new")]


@pytest.mark.parametrize("keep", [True, False])
async def test_a_row_that_only_an_old_snapshot_shows_is_not_published(
    database: str, directory: asyncpg.Connection, *, keep: bool
):
    """Under REPEATABLE READ a writer sees the former row for as long as its transaction lasts."""
    await insert(directory, ("t1", "old"))
    await sent(directory)
    async with connected(database) as other, other.transaction(isolation="repeatable_read"):
        await other.execute("SELECT FROM terminal_acquirer")
        await directory.execute(OFF + "'t1'")
        await insert(other, ("t1", "new"))
        if not keep:
            await other.execute("UPDATE terminal_acquirer SET is_active = false WHERE acquirer_id = 'new'")
    assert await acquirers(directory) == [("t1", None), ("t1", "new"), *([] if keep else [("t1", None)])]


async def test_a_row_of_another_transaction_that_began_later_is_not_published_as_the_writers_own(
    database: str, directory: asyncpg.Connection
):
    """A lock gives an id before the snapshot is taken: what others have written until then has higher ones."""
    await directory.execute("CREATE TABLE other ()")
    async with connected(database) as other, other.transaction(isolation="repeatable_read"):
        await other.execute("LOCK TABLE other")
        await insert(directory, ("t1", "old"))
        await other.execute("SELECT FROM terminal_acquirer")
        await directory.execute(OFF + "'t1'")
        await insert(other, ("t1", "new"))
    assert await acquirers(directory) == [("t1", "old"), ("t1", None), ("t1", "new")]


async def begun(db: asyncpg.Connection, level: Any) -> Any:
    """A transaction that sees what has been committed by now, and has touched no table of the test."""
    transaction = db.transaction(isolation=level)
    await transaction.start()
    await db.execute("SELECT FROM sidings.directory")
    return transaction


@pytest.mark.parametrize("level", ["repeatable_read", "serializable"])
@pytest.mark.parametrize(
    "change",
    [
        SET_UP.replace("'terminals'", "'others'"),
        SET_UP.replace("'is_active')", "'is_active', left_out => '{acquirer_id}')"),
        "ALTER TABLE terminal_acquirer ADD note text NOT NULL DEFAULT ''",
        "ALTER TABLE terminal_acquirer DROP updated_date",
    ],
    ids=["topic", "left out", "new column", "column gone"],
)
async def test_a_transaction_that_sees_the_table_as_it_was_set_up_before_publishes_nothing_by_that(
    database: str, directory: asyncpg.Connection, change: str, level: Any
):
    """It was published to the former topic alone, with columns that are left out, or without the new one."""
    await insert(directory, ("t1", "a"))
    edit = "UPDATE terminal_acquirer SET acquirer_id = 'b'"
    await directory.execute(
        f"""CREATE TRIGGER a_users BEFORE UPDATE ON terminal_acquirer FOR EACH ROW
                EXECUTE FUNCTION suppress_redundant_updates_trigger();
            SELECT sidings.directory_remove('terminal_acquirer'); {SET_UP}"""
    )
    async with connected(database) as other:
        former = await begun(other, level)
        await directory.execute(change)
        await sent(directory)
        with pytest.raises(asyncpg.SerializationError, match="was changed after this transaction began"):
            await other.execute(edit)
        await former.rollback()
        assert await sent(directory) == []
        async with other.transaction(isolation=level):
            await other.execute(edit)
            await other.execute("ALTER TABLE terminal_acquirer ADD mine text, ADD other text, DROP id")
            await insert(other, ("t2", "c"))
    assert (await sent(directory))[-1][0] == "t2"


async def test_a_transaction_that_began_before_the_table_was_set_up_is_to_run_again(
    database: str, db: asyncpg.Connection
):
    """It was told that the table is no directory, and to take its triggers off."""
    async with connected(database) as other:
        former = await begun(other, "repeatable_read")
        await db.execute(SET_UP)
        with pytest.raises(asyncpg.SerializationError, match="was changed after this transaction began"):
            await insert(other, ("t1", "a"))
        await former.rollback()
        await insert(other, ("t1", "a"))
    assert await acquirers(db) == [("t1", "a")]


@pytest.mark.parametrize("call", [SET_UP, "SELECT sidings.directory_republish('terminal_acquirer')"])
async def test_what_was_being_written_when_all_was_published_is_in_it(
    database: str, directory: asyncpg.Connection, call: str
):
    await insert(directory, ("t1", "a"))
    if call == SET_UP:
        await directory.execute("SELECT sidings.directory_remove('terminal_acquirer')")
    async with connected(database) as other, connected(database) as third:
        async with directory.transaction():
            await directory.execute("UPDATE terminal_acquirer SET acquirer_id = 'b'")
            waiting = asyncio.create_task(other.execute(call))
            await blocked(third, other.get_server_pid())
        await waiting
        async with other.transaction():
            await other.execute(SET_UP.replace("'terminals'", "'elsewhere'"))
            waiting = asyncio.create_task(directory.execute("UPDATE terminal_acquirer SET acquirer_id = 'c'"))
            await blocked(third, directory.get_server_pid())
        await waiting
    assert (await acquirers(directory))[-3:] == [("t1", "b"), ("t1", "b"), ("t1", "c")]


async def test_the_quickstart_of_the_page_brings_each_change_into_a_directory(
    database: str, db: asyncpg.Connection, sidings_kafka: str, topic: Any
):
    terminals = await topic("terminals", config={"cleanup.policy": "compact"})
    await insert(db, ("1", "before"))
    await db.execute(block(PAGE, "Quickstart", "sql").replace("'terminal-acquirer'", f"'{terminals}'"))

    def reading(name: str, **options: Any) -> Directory[Any]:
        assert name == "terminal-acquirer"
        return Directory(terminals, **options)

    page = run(PAGE, "Quickstart", BaseModel=BaseModel, Directory=reading, kafka=sidings_kafka)
    async with relaying(database, sidings_kafka):
        await emptied(database)
        assert await page["acquirer_of"]("1") == "before"
        async with Directory(terminals, kafka=sidings_kafka, model=page["TerminalAcquirer"]) as directory:
            await insert(db, ("2", "a"), ("3", "a"))
            await db.execute("UPDATE terminal_acquirer SET acquirer_id = 'b' WHERE terminal_id = '2'")
            await db.execute(OFF + "'3'")
            await db.execute("DELETE FROM terminal_acquirer WHERE NOT is_active")
            await insert(db, ("4", "last"))
            await eventually(lambda: "4" in directory)
            assert {key: row.acquirer_id for key, row in directory.items()} == {"1": "before", "2": "b", "4": "last"}


KEYS = [f"t{n}" for n in range(5)]
RETRIES = (asyncpg.UniqueViolationError, asyncpg.DeadlockDetectedError)

# What edits do to a key; $1 the key, $2 a new acquirer. Those that touch its active row return something.
EDITS = {
    "insert": "INSERT INTO terminal_acquirer (terminal_id, acquirer_id) VALUES ($1, $2) RETURNING 1",
    "upsert": """INSERT INTO terminal_acquirer (terminal_id, acquirer_id) VALUES ($1, $2) ON CONFLICT (terminal_id)
                 WHERE is_active DO UPDATE SET acquirer_id = excluded.acquirer_id RETURNING 1""",
    "update": "UPDATE terminal_acquirer SET acquirer_id = $2 WHERE terminal_id = $1 AND is_active RETURNING 1",
    "deactivate": """UPDATE terminal_acquirer SET is_active = false WHERE terminal_id = $1 AND is_active AND $2 <> ''
                     RETURNING 1""",
    "reactivate": """UPDATE terminal_acquirer SET is_active = true, acquirer_id = $2 WHERE id = (
                         SELECT max(id) FROM terminal_acquirer WHERE terminal_id = $1 AND NOT is_active) RETURNING 1""",
    "edit an old one": """UPDATE terminal_acquirer SET acquirer_id = $2 WHERE id = (
                              SELECT min(id) FROM terminal_acquirer WHERE terminal_id = $1 AND NOT is_active)
                          AND NOT is_active""",
    "insert an old one": """INSERT INTO terminal_acquirer (terminal_id, acquirer_id, is_active)
                            VALUES ($1, $2, false)""",
    "delete old ones": "DELETE FROM terminal_acquirer WHERE terminal_id = $1 AND NOT is_active AND $2 <> ''",
}


async def edit(dsn: str, seed: int, fresh: Callable[[], str], done: Callable[[], bool]) -> None:
    """Random edits, several to a transaction. Of each key that is touched, so locked, the journal gets the state."""
    choose = random.Random(seed)
    async with connected(dsn) as db:
        while not done():
            with suppress(*RETRIES):
                async with db.transaction():
                    for key in sorted(choose.choices(KEYS, k=choose.randint(1, 3))):
                        statement = EDITS[choose.choice(list(EDITS))]
                        if await db.fetchval(statement, key, fresh()):
                            await db.execute(
                                """INSERT INTO journal (key, acquirer) SELECT $1, (SELECT acquirer_id
                                       FROM terminal_acquirer WHERE terminal_id = $1 AND is_active)""",
                                key,
                            )
                    if choose.random() < 0.1:
                        raise asyncpg.DeadlockDetectedError("rolled back for a change")


async def test_the_topic_tells_the_history_of_each_key_under_concurrent_edits_and_ends_as_the_table_does(
    database: str, directory: asyncpg.Connection, sidings_kafka: str, topic: Any
):
    """Writers, republishing and the relay at once. The journal is written under the locks that the edits take, so for
    each key it is in the order of the commits; a republished state is a repeat."""
    terminals, numbers = await topic("terminals", partitions=3), count()
    await directory.execute("CREATE TABLE journal (id bigserial, key text, acquirer text)")
    await directory.execute(SET_UP.replace("'terminals'", f"'{terminals}'"))
    written = 0

    def fresh() -> str:
        nonlocal written
        written = next(numbers)
        return str(written)

    async with relaying(database, sidings_kafka, poll_seconds=0.005), asyncio.TaskGroup() as group:
        for seed in range(5):
            group.create_task(edit(database, seed, fresh, lambda: written > 1_000))
        for mark in (300, 600):
            await eventually(lambda mark=mark: written > mark)
            await directory.execute("SELECT sidings.directory_republish('terminal_acquirer')")
        await eventually(lambda: written > 1_000)
    async with relaying(database, sidings_kafka):
        await emptied(database)
    told = [(r.key.decode(), r.value and json.loads(r.value)) for r in await records(sidings_kafka, terminals)]
    rows = await fetch(
        database, "SELECT terminal_id AS key, to_jsonb(t)::text AS row FROM terminal_acquirer t WHERE is_active"
    )
    last = {key: row for key, row in dict(told).items() if row is not None}
    assert last == {row["key"]: json.loads(row["row"]) for row in rows}
    journal = await fetch(database, "SELECT key, acquirer FROM journal ORDER BY id")
    for key in KEYS:
        wanted = [row["acquirer"] for row in journal if row["key"] == key]
        found = [row and row["acquirer_id"] for its_key, row in told if its_key == key]
        assert len(wanted) > 30
        assert [state for state, _ in groupby(found)] == [state for state, _ in groupby(wanted)]


# -- what a relay puts right ----------------------------------------------------------------------------------------


async def test_what_the_table_says_of_keys_is_published_again_also_where_they_are_gone(directory: asyncpg.Connection):
    await insert(directory, ("t1", "a"), ("t2", "b"), ("t3", "c"))
    await directory.execute(OFF + "'t2'")
    await sent(directory)
    repeat = "SELECT sidings.directory_repeat($1, $2)"
    assert await directory.fetchval(repeat, "terminals", [b"t1", b"t2", b"nowhere", b"\xff"]) == 4
    rows = await directory.fetch(
        "DELETE FROM sidings.outbox RETURNING key, value, slot, sidings.outbox_slot(topic, key)"
    )
    assert {row["key"]: row["value"] and json.loads(row["value"])["acquirer_id"] for row in rows} == {
        b"t1": "a", b"t2": None, b"nowhere": None, b"\xff": None
    }  # fmt: skip
    assert all(row["slot"] == row["outbox_slot"] for row in rows)
    assert await directory.fetchval(repeat, "no directory's", [b"t1"]) == 0
    await directory.execute("DROP TABLE terminal_acquirer")
    assert await directory.fetchval(repeat, "terminals", [b"t1"]) == 0
    assert await sent(directory) == []


async def test_what_was_being_written_when_keys_were_published_again_comes_before(
    database: str, directory: asyncpg.Connection
):
    await insert(directory, ("t1", "a"))
    async with connected(database) as other, connected(database) as third:
        async with directory.transaction():
            await directory.execute("UPDATE terminal_acquirer SET acquirer_id = 'b'")
            waiting = asyncio.create_task(other.execute("SELECT sidings.directory_repeat('terminals', '{t1}')"))
            await blocked(third, other.get_server_pid())
        await waiting
    assert await acquirers(directory) == [("t1", "a"), ("t1", "b"), ("t1", "b")]
