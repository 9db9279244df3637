"""Debezium's form: an envelope with a `transaction` block, and a topic with the begins and ends of transactions.

The connector must run with ``provide.transaction.metadata=true``. Values are JSON, with or without the schema that
Connect's converter puts around them.
"""

from base64 import b64decode
from decimal import Decimal
from typing import Any, Literal, cast

from .changes import Change, Malformed, checked_id, field_of, mapping, positive
from .config import Config
from .messages import Json

__all__ = ["change", "end"]

OPERATIONS: dict[str, Literal["INSERT", "UPDATE", "DELETE", "SNAPSHOT"]] = {
    "c": "INSERT",
    "u": "UPDATE",
    "d": "DELETE",
    "r": "SNAPSHOT",
}
DECIMAL = "org.apache.kafka.connect.data.Decimal"
VARIABLE = "io.debezium.data.VariableScaleDecimal"  # each value has its scale
_MOST_DIGITS = 20_000  # behind the point; Postgres has 16,383


def change(config: Config, body: Json) -> Change:
    """The change in the value of a table's topic.

    Raises:
        Malformed: A field is missing or makes no sense.
    """
    body = _with_numbers(body.get("schema"), _unwrapped(body))
    source = mapping(field_of(body, "source", dict, "the value"), "source")
    connector = source.get("connector")
    if connector not in (None, config.connector):
        raise Malformed(f"'connector' of the source is {connector!r}; the configuration says {config.connector!r}")
    op = field_of(body, "op", str, "the value")
    block = body.get("transaction")
    if op == "m":
        # What `pg_logical_emit_message` has written counts in its transaction, if it is of one, and is of no table.
        return Change("", "SNAPSHOT", {}, None, *(_position(config, block) if block is not None else (None, None)))
    table = _table(config, source)
    if op != "t" and op not in OPERATIONS:
        raise Malformed(f"'op' of the value is {op!r}, not c, u, d, t, r or m")
    if op != "r" and block is None:
        raise Malformed("the value has no 'transaction': set provide.transaction.metadata=true in the connector")
    if op == "t":
        # A truncate counts in its transaction, but says nothing about any root: the missing key is told.
        return Change(table, "DELETE", {}, None, *_position(config, block))
    operation = OPERATIONS[op]
    before = body.get("before")
    data = mapping(field_of(body, "before" if op == "d" else "after", dict, "the value"), "the row")
    return Change(
        table,
        operation,
        data,
        mapping(before, "before") if op == "u" and before is not None else None,
        *(_position(config, block) if op != "r" else (None, None)),
    )


def end(config: Config, body: Json) -> tuple[str | None, int]:
    """The transaction that a value of the boundary topic ends, and the number of its rows. None: it is a begin.

    Raises:
        Malformed: A field is missing or makes no sense.
    """
    body = _unwrapped(body)
    status = field_of(body, "status", str, "the boundary")
    transaction = _id(config, field_of(body, "id", str, "the boundary"))
    if status == "BEGIN":
        return None, 0
    if status != "END":
        raise Malformed(f"'status' of the boundary is {status!r}, not BEGIN or END")
    return transaction, positive(body.get("event_count"), "'event_count' of the boundary", least=0)


def _position(config: Config, block: object) -> tuple[str, int]:
    block = mapping(block, "transaction")
    ordinal = positive(block.get("total_order"), "'total_order' of the transaction")
    return _id(config, field_of(block, "id", str, "the transaction")), ordinal


def _id(config: Config, id: str) -> str:
    # Postgres: txId:LSN, and the LSN is another one in each event. MySQL: uuid:number, which belong together.
    return checked_id(id.partition(":")[0] if config.connector == "postgresql" else id, "the id of the transaction")


def _unwrapped(body: Json) -> Json:
    return mapping(body["payload"], "payload") if body.keys() >= {"schema", "payload"} else body


def _with_numbers(schema: object, body: Json) -> Json:
    """With decimal numbers as text, as with ``decimal.handling.mode=string``: Connect writes them in base64 by default,
    and their scale into the schema, which no event has."""
    for side in _fields(schema):
        name = side.get("field")
        row = body.get(cast(str, name)) if name in ("before", "after") else None
        if isinstance(row, dict):
            row = cast(Json, row)
            columns = [column for column in _fields(side) if column.get("name") in (DECIMAL, VARIABLE)]
            if found := {c["field"]: text for c in columns if (text := _number(row, c)) is not None}:
                body = {**body, cast(str, name): {**row, **found}}
    return body


def _number(row: Json, column: Json) -> str | None:
    """The text of a decimal number; None where the row has it in a form that can be read, or in none that is known."""
    try:
        value: Any = row[cast(str, column["field"])]
        known: Any = value if column["name"] == VARIABLE else column["parameters"]
        value, scale = (value["value"] if known is value else value), known["scale"]
        if not isinstance(value, str) or abs(int(scale)) > _MOST_DIGITS:
            return None
        return format(Decimal(f"{int.from_bytes(b64decode(value, validate=True), signed=True)}E{-int(scale)}"), "f")
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return None


def _fields(schema: object) -> list[Json]:
    """Of a struct's schema."""
    fields = cast(Json, schema).get("fields") if isinstance(schema, dict) else None
    return [field for field in cast(list[Json], fields) if isinstance(field, dict)] if isinstance(fields, list) else []


def _table(config: Config, source: Json) -> str:
    table = cast(str, field_of(source, "table", str, "the source"))
    full = f"{source.get('schema') or source.get('db')}.{table}"
    return full if full in config.group_of or table not in config.group_of else table
