"""From a Kafka record to a change of the directory: the formats that are read, keys, and the flag that deletes.

Rows as a service or an outbox writes them, those of Kafka Connect's JDBC source and Debezium's envelopes are told apart
record by record, each with or without the wrapper ``{"schema": ..., "payload": ...}``.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeAlias, TypeVar, cast

from pydantic import BaseModel, RootModel, TypeAdapter, ValidationError, create_model
from pydantic.alias_generators import to_camel
from pydantic_core import from_json

from ...errors import ConfigurationError
from ...jobs.payloads import adapter_of
from ..calling import puts_off, told_of
from ..checks import check_function
from ..message import Message, Record
from ..subscription import Decoder
from .reading import reading_of

__all__ = ["BadRecord", "Change", "KeyOf", "Row", "Rows", "Unreadable"]

T = TypeVar("T")

Row: TypeAlias = str | bytes
"""What tells a row of the table: the message key. Text, or the key's bytes where the directory's key is another."""

Change: TypeAlias = tuple[Row, Hashable, T | None, Record | None]
"""Row, key in the directory, value, and the record that it came from. Value and record are None for a deletion."""

KeyOf: TypeAlias = str | Callable[[T], Hashable]

_JSON_STARTS = frozenset(b'{"')
_ENVELOPE = frozenset({"before", "after", "source", "op", "ts_ms", "ts_us", "ts_ns", "transaction", "schema"})
_OPERATIONS = frozenset("crudtm")
# What Debezium puts in the place of a large value that an update has left alone, since Postgres does not log it then:
# as text, and as bytes.
_UNAVAILABLE = "__debezium_unavailable_value"
_UNAVAILABLE_BYTES = "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="
_LACKING, _LACKING_BYTES = _UNAVAILABLE.encode(), _UNAVAILABLE_BYTES.encode()
_Z, _EQUALS = b"z="  # one byte is found in an eighth of the time, and few rows have these
_MAX_REASON = 500  # characters of an error that are kept


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that could not be applied, so that the row's former value stays.

    Attributes:
        key: As text, or as Python writes bytes; None where there is none.
        timestamp_ms: Of the record, milliseconds since 1970.
        reason: What is wrong with it, for a person.
    """

    topic: str
    partition: int
    offset: int
    key: str | None
    timestamp_ms: int
    reason: str


Unreadable: TypeAlias = tuple[int, Row | None, BadRecord]
"""How many changes come before it, its row where that is known, and what is wrong."""


class _Refused(ValueError):
    """A record that cannot be applied, for a reason that is ours to tell."""


class Rows(Generic[T]):
    """Reads the records of one topic.

    model: of a row; what pydantic can validate. decoder: makes the value from the raw message instead of JSON; None
    from it deletes. key: of the directory; None: the message key as text; a field of the model, or a function of the
    value.
    active: the field whose ``false`` deletes, in snake_case or camelCase; None: there is none.

    Raises `ConfigurationError`.
    """

    def __init__(
        self,
        topic: str,
        *,
        model: type[T] | None,
        decoder: Decoder | None,
        key: KeyOf[T] | None,
        active: str | None,
    ) -> None:
        if model is None and decoder is None:
            raise ConfigurationError(f"directory {topic!r}: give model=, the pydantic model of a row, or decoder=")
        if active is not None and not (isinstance(active, str) and active):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(
                f"directory {topic!r}: active={active!r}: name the field, or give None where there is none"
            )
        check_function(decoder, "decoder", f"directory {topic!r}", "the message")
        self.topic = topic
        self.derived = key is not None
        self._model: Any = model
        self._decoder = decoder
        self._key = key
        self._key_of = _key_function(topic, key, model)
        self._flags, self._flag_field = _flags(active, model)
        self._look_closer = _look_closer(self._flags, model, self._flag_field)
        self._columns = _columns(model)
        adapter = None if model is None else adapter_of(model, f"directory {topic!r}")
        # As `validate_json` and `validate_python`, in less time.
        self._validate_json: Any = adapter and adapter.validator.validate_json
        self._validate_python: Any = adapter and adapter.validator.validate_python
        self._shapes: dict[tuple[str, ...], Callable[[bytes], Any]] = {(): self._validate_json}
        self._read = self._unwrapped = 0  # changes, and keys that were inside of JSON
        self.fits = False  # whether the model, or the decoder, has taken any record so far, also of a row that is off

    @property
    def mixed(self) -> bool:
        """Whether some keys were inside of JSON and others were not: to Kafka these are different ones, also where the
        text is the same, so that compaction keeps both, and no order holds between them."""
        return 0 < self._unwrapped < self._read

    def describe(self) -> str:
        """How this reads, for comparison: a store that was read in another way is of no use."""
        return reading_of(self._model, self._key, self._decoder, self._flags)

    def read_all(self, records: Iterable[Record]) -> tuple[list[Change[T]], list[Unreadable]]:
        """The changes that `records` make, in order, and the records that cannot be applied. Raises the `Snooze` of who
        cannot decode one now."""
        changes: list[Change[T]] = []
        bad: list[Unreadable] = []
        add = changes.append
        validate = None if self._decoder is not None else self._validate_json
        look_closer, key_of, flag = self._look_closer, self._key_of, self._flag_field
        for record in records:
            try:
                key, raw = record.key, record.value
                if validate is None or raw is None or not key or key[0] in _JSON_STARTS:
                    add(self.read(record))
                    continue
                if (
                    (_Z in raw and _LACKING in raw)
                    or (_EQUALS in raw and _LACKING_BYTES in raw)
                    or (look_closer is not None and look_closer(raw))
                ):
                    add(self.read(record))
                    continue
                try:
                    value = validate(raw)
                except ValidationError:
                    add(self.read(record))
                    continue
                row = key if key_of is not None else key.decode()
                if value is None or (flag is not None and not getattr(value, flag)):
                    add(self.read(record))
                else:
                    add((row, row if key_of is None else _hashable(key_of(value)), value, record))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a decoder may raise anything; whatever it is, it is kept
                if puts_off(error):
                    raise
                bad.append((len(changes), self._row_or_none(record), _bad(record, error)))
        self._read += len(changes)
        return changes, bad

    def read(self, record: Record) -> Change[T]:
        """The change that one record makes. Raises whatever is wrong with it."""
        row = self._row_of(record.key)
        value = self.decode(record)
        if value is None:
            return row, None, None, None
        return row, row if self._key_of is None else _hashable(self._key_of(value)), value, record

    def decode(self, record: Record) -> T | None:
        """The value of a record, None where it deletes the row. Raises whatever is wrong with it."""
        raw = record.value
        if raw is None:
            return None
        if self._decoder is not None:
            return self._by_decoder(self._decoder, record)
        lacking = _LACKING in raw or _LACKING_BYTES in raw
        if not (lacking or (self._look_closer is not None and self._look_closer(raw))):
            try:
                return self._active(self._validate_json(raw))
            except ValidationError:
                pass  # it may be more than a row, or a deletion that need not be valid
        data, path = _unwrap(from_json(raw))
        if data is None or any(data.get(flag) is False or data.get(flag) == 0 for flag in self._flags):
            if data is not None and not self.fits:
                with suppress(ValidationError):
                    self._active(self._shape(path)(raw))
            return None
        if lacking:
            self._check_columns(data)
        return self._active(self._shape(path)(raw))

    def key_of(self, row: Row, value: T) -> Hashable:
        """The key in the directory of a row that has been decoded before."""
        return row if self._key_of is None else self._key_of(value)

    def _by_decoder(self, decoder: Decoder, record: Record) -> T | None:
        message: Message[bytes | None] = Message(
            record.value, record.topic, record.partition, record.offset, record.timestamp, record.key, record.headers
        )
        value: Any = decoder(message)
        if value is not None and self._validate_python is not None:
            value = self._validate_python(value)
        self.fits = True
        return None if any(_member(value, flag) is False for flag in self._flags) else value

    def _check_columns(self, row: Mapping[str, Any]) -> None:
        """Raises where Debezium did not know a value that is read."""
        for name, value in row.items():
            lacking = value in (_UNAVAILABLE, _UNAVAILABLE_BYTES) or (  # of an array and of hstore: inside
                isinstance(value, list | dict) and _UNAVAILABLE in value
            )
            if lacking and (self._columns is None or name in self._columns):
                raise _Refused(
                    f"Debezium did not know the value of {name}, which is large and was not changed: set REPLICA "
                    "IDENTITY FULL for the table, or its ReselectColumnsPostProcessor in the connector"
                )

    def _active(self, value: T) -> T | None:
        """None where the model's own field says so, which may have read ``"no"`` as false."""
        self.fits = True
        return None if self._flag_field is not None and getattr(value, self._flag_field) in (False, 0) else value

    def _shape(self, path: tuple[str, ...]) -> Callable[[bytes], Any]:
        """Validates a row that lies deeper in the JSON, in one pass."""
        if path not in self._shapes:
            shape: Any = self._model
            for name in reversed(path):
                fields: dict[str, Any] = {name: (shape, ...)}
                shape = create_model("Envelope", **fields)
            validate: Any = TypeAdapter[Any](shape).validator.validate_json
            get = attrgetter(".".join(path))

            def validate_inside(raw: bytes) -> Any:
                return get(validate(raw))

            self._shapes[path] = validate_inside
        return self._shapes[path]

    def _row_of(self, key: bytes | None) -> Row:
        if key is None:
            raise _Refused("it has no key, so nothing tells its row: a compacted topic needs keys")
        if self._key_of is not None:
            return key
        text = _text(key)
        self._unwrapped += len(text.encode()) != len(key)
        return text

    def _row_or_none(self, record: Record) -> Row | None:
        try:
            return self._row_of(record.key)
        except ValueError:
            return None


def _key_function(topic: str, key: Any, model: Any) -> Callable[[Any], Hashable] | None:
    if key is None or (callable(key) and not isinstance(key, str)):
        check_function(key, "key", f"directory {topic!r}", "the value")
        return key
    if not isinstance(key, str) or not key.isidentifier():
        raise ConfigurationError(f"directory {topic!r}: key={key!r}: give a field of the model, a function, or None")
    if isinstance(model, type) and issubclass(model, BaseModel):
        if key not in model.model_fields:
            raise ConfigurationError(
                f"directory {topic!r}: key={key!r} is no field of {model.__name__}: give one of "
                f"{', '.join(model.model_fields)}"
            )
        return attrgetter(key)
    name = key

    def member(value: Any) -> Hashable:
        if (found := _member(value, name)) is None:
            raise _Refused(f"it has no {name}, which is its key in the directory")
        return found

    return member


def _member(value: Any, name: str) -> Any:
    """An item of a mapping, or an attribute; None where there is none."""
    return cast(Mapping[str, Any], value).get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _flags(active: str | None, model: Any) -> tuple[frozenset[str], str | None]:
    """The names that the flag may have in JSON, and the model's field for it, if there is one."""
    if active is None:
        return frozenset(), None
    names, field = {active, to_camel(active)}, None
    if isinstance(model, type) and issubclass(model, BaseModel):
        for name, info in model.model_fields.items():
            if name in names:
                field = name
                aliases = (info.alias, info.validation_alias)
                names |= {alias for alias in aliases if isinstance(alias, str)}
    return frozenset(names), field


def _look_closer(flags: frozenset[str], model: Any, flag_field: str | None) -> Callable[[bytes], object] | None:
    """Finds what may make a row more than a row, so that the JSON has to be parsed twice: a wrapper, an envelope, a
    flag that is false. None: the model itself tells, as it has the flag, and a field without which it is not valid."""
    found: list[bytes] = []
    if not (isinstance(model, type) and issubclass(model, BaseModel) and _tells_rows(model)):
        found.append(rb'"(?:payload|op)"')
    if flags and flag_field is None:
        found.append(rb'"(?:' + b"|".join(re.escape(flag.encode()) for flag in sorted(flags)) + rb')"\s*:\s*[f0]')
    return re.compile(b"|".join(found)).search if found else None


def _tells_rows(model: type[BaseModel]) -> bool:
    """Whether no wrapper and no envelope can be a valid row: they lack a field that is required. A `RootModel` has one
    in name only: what it is of may take any object."""
    if issubclass(model, RootModel):
        return False
    for name, info in model.model_fields.items():
        alias = info.validation_alias
        if info.is_required() and isinstance(alias, str | None) and not {name, alias} & (_ENVELOPE | {"payload"}):
            return True
    return False


def _columns(model: Any) -> frozenset[str] | None:
    """The names of what a model reads. None: it may read anything."""
    if not (isinstance(model, type) and issubclass(model, BaseModel)) or issubclass(model, RootModel):
        return None
    aliases = {name: info.validation_alias for name, info in model.model_fields.items()}
    if model.model_config.get("extra") == "allow" or not all(isinstance(a, str | None) for a in aliases.values()):
        return None
    return frozenset(filter(None, cast(Iterable[str | None], (*aliases, *aliases.values()))))


def _unwrap(data: Any) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """The row inside of what a connector wrote (None: it is deleted), and the way to it."""
    path: tuple[str, ...] = ()
    if isinstance(data, dict) and cast(dict[str, Any], data).keys() == {"schema", "payload"}:
        data, path = cast(dict[str, Any], data)["payload"], ("payload",)
    if not isinstance(data, dict):
        if data is None:
            return None, path
        raise _Refused(f"its value is {type(data).__name__}, not a JSON object")
    row = cast(dict[str, Any], data)
    if row.get("op") in _OPERATIONS and "after" in row and row.keys() <= _ENVELOPE:
        if row["after"] is None:
            return None, path
        row, path = cast(dict[str, Any], row["after"]), (*path, "after")
    return row, path


def _text(key: bytes) -> str:
    """A message key as text. Of JSON that a connector wrote, what is inside: the text of ``"T-1"``, the only field of
    ``{"id": 1}``."""
    text = key.decode()
    if not text or key[0] not in _JSON_STARTS:
        return text
    try:
        data: Any = from_json(key)
    except ValueError:
        return text  # it is no JSON, so it is a text
    if isinstance(data, dict) and cast(dict[str, Any], data).keys() == {"schema", "payload"}:
        data = cast(dict[str, Any], data)["payload"]
    if isinstance(data, dict):
        fields = cast(dict[str, Any], data)
        if len(fields) != 1:
            raise _Refused(
                f"its key has the fields {', '.join(fields)}: say with key= what the directory's key is, e.g. "
                "key=lambda row: (row.a, row.b)"
            )
        data = next(iter(fields.values()))
    if isinstance(data, str):
        return data
    if isinstance(data, int | float) and not isinstance(data, bool):
        return str(data)
    raise _Refused(f"its key is {text[:100]}: give key=")


def _hashable(key: Hashable) -> Hashable:
    if key is None:
        raise _Refused("its key in the directory is None")
    hash(key)
    return key


def _bad(record: Record, error: BaseException) -> BadRecord:
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False, include_input=False, include_context=False)
        reason = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'value'}: {one['msg']}" for one in found)
    elif isinstance(error, _Refused):
        reason = str(error)
    else:
        reason = told_of(error)
    key = record.key
    return BadRecord(
        record.topic,
        record.partition,
        record.offset,
        None if key is None else _shown(key),
        record.timestamp,
        reason[:_MAX_REASON],
    )


def _shown(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        return repr(key)
