"""The header form: ``{"header": {"table", "operation", "transactionId", …}, "data": {…}}``."""

from typing import cast

from .changes import Change, Malformed, checked_id, field_of, mapping, positive
from .messages import Json

__all__ = ["change"]

OPERATIONS = {"INSERT", "UPDATE", "DELETE"}


def change(body: Json) -> Change:
    """The change in a value. Without a transactionId it is a row of a snapshot ("refresh").

    Raises:
        Malformed: A field is missing or makes no sense.
    """
    header = mapping(field_of(body, "header", dict, "the value"), "header")
    data = mapping(field_of(body, "data", dict, "the value"), "data")
    table = cast(str, field_of(header, "table", str, "the header"))
    counter = header.get("transactionEventCounter")
    if header.get("transactionId") is None:
        if counter is not None:
            raise Malformed("the header has a 'transactionEventCounter' but no 'transactionId'")
        if str(header.get("operation")).upper() == "DELETE":  # it would be a row of the snapshot, where it is none
            raise Malformed("'operation' of the header is DELETE, but it has no 'transactionId'")
        return Change(table, "SNAPSHOT", data)
    transaction = checked_id(field_of(header, "transactionId", str, "the header"), "'transactionId' of the header")
    operation = str(header.get("operation")).upper()
    if operation not in OPERATIONS:
        raise Malformed(f"'operation' of the header is {header.get('operation')!r}, not INSERT, UPDATE or DELETE")
    ordinal = positive(counter, "'transactionEventCounter' of the header")
    last = field_of(header, "transactionLastEvent", bool, "the header")
    before = body.get("before")
    return Change(
        table,
        operation,  # pyright: ignore[reportArgumentType]  # one of OPERATIONS
        data,
        before=None if before is None else mapping(before, "before"),
        transaction=transaction,
        ordinal=ordinal,
        last=ordinal if last else None,
    )
