"""A job's payload as it is stored: checked before anything is written, so that the handler gets what was given."""

from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import is_dataclass
from functools import cached_property, partial
from typing import Any, Generic, Literal, TypeVar, cast, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, from_json

from ..errors import ConfigurationError, InvalidPayload
from .doubts import (
    LeftOut,
    classes_in,
    fields_left_out,
    may_be_unreadable,
    may_become_another,
    may_change,
    may_have_keys,
    may_hold_floats,
    runs_again,
    wants_the_future,
)
from .job import P
from .kinds import ROOT, fields_in_doubt, other_kind
from .limits import may_be_nested, too_much_in
from .lossy import (
    HALF,
    MASK,
    STAR,
    becomes_another,
    changed_fields,
    has_half_characters,
    held_by,
    is_changed,
    is_other,
    masks_secret,
    not_finite,
    same_but_for_order,
    told,
)

__all__ = ["Payloads", "adapter_of"]

T = TypeVar("T")

_NO_NUMBER = (
    "it holds a float that is NaN or infinite, for which JSON has no form: give its model "
    "ConfigDict(ser_json_inf_nan='strings'), or None in its place"
)
_LONG = 400  # bytes: what is shorter is nested by 200 at most


def adapter_of(model: Any, what: str, argument: str = "model") -> TypeAdapter[Any]:
    """What validates a `model`. Raises `ConfigurationError` where pydantic can make nothing of it, or anything."""
    if _is_open(model):
        raise ConfigurationError(
            f"{what}: {argument}={model!r}: a TypeVar names no model, anything would fit: give {argument}=YourModel"
        )
    try:
        adapter = TypeAdapter[Any](model)
        adapter.rebuild(raise_errors=True)
    except Exception as error:  # of what is no type pydantic raises KeyError and SyntaxError as well
        why = str(error).split("\n")[0]
        remedy = f"give a type that pydantic can validate: {why}"
        raise ConfigurationError(f"{what}: {argument}={model!r}: {remedy}") from error
    return adapter


def _is_open(model: Any) -> bool:
    """Whether a TypeVar stands in it. A generic class without its arguments is one of anything, as it says."""
    is_model = isinstance(model, type) and issubclass(model, BaseModel)
    arguments = cast(type[BaseModel], model).__pydantic_generic_metadata__["args"] if is_model else get_args(model)
    return isinstance(model, TypeVar) or any(map(_is_open, arguments))


class Payloads(Generic[P]):
    """Those of one job type. model: what pydantic makes a `TypeAdapter` of."""

    def __init__(self, type_name: str, model: Any) -> None:
        self._type_name = type_name
        self._adapter: TypeAdapter[P] = adapter_of(model, type_name, "payload")
        if wants_the_future(self._adapter.core_schema):
            raise ConfigurationError(
                f"{type_name}: payload={model!r}: a FutureDatetime or FutureDate is validated again when the job runs, "
                "which is held if the time has come meanwhile: declare an AwareDatetime or a date, and look at the "
                "clock before you enqueue"
            )
        # As `validate_json`, `validate_python` and `dump_json`, in less time.
        self._parse = self._adapter.validator.validate_json
        self._validate = self._adapter.validator.validate_python
        self._to_json = self._adapter.serializer.to_json

    def load(self, text: str | None) -> P:
        """Parse a stored payload. Raises pydantic's `ValidationError`."""
        # By name, as `prepared` writes it, and by alias, as a Kafka message or another program may have it.
        return self._parse("null" if text is None else text, by_name=True, by_alias=True)

    def prepared(self, payload: P) -> tuple[P, bytes]:
        """The payload as its model makes it, which also decides its group, and as JSON that `load` can read back."""
        [checked], [text] = self.all_prepared([payload], lambda checked: checked)
        return checked, text

    def all_prepared(self, payloads: Iterable[P], note: Callable[[P], T]) -> tuple[list[T], list[bytes]]:
        """`prepared` for each, without a call for each; of what its model makes, what `note` takes from it at once: a
        generator may use its object again."""
        validate, to_json = self._validate, self._to_json
        notes, texts = list[T](), list[bytes]()
        may_hold_nan, may_run_again, may_have_keys = self._may_hold_floats, self._may_run_again, self._may_have_keys
        may_be_other = self._may_become_another or self._may_change
        warn = self._warn
        for payload in payloads:  # outside of the try: what a generator raises is its caller's
            try:
                # Validators of a whole model run once more, and may change it where it stands.
                made = may_run_again and not self._classes.isdisjoint(type(payload).__mro__)
                given = to_json(payload, round_trip=True, by_alias=False, warnings=False) if made else b""
                checked = validate(copy(payload) if made else payload, by_name=True, by_alias=True)
                try:
                    text = to_json(checked, round_trip=True, by_alias=False, warnings=warn)
                except PydanticSerializationError:
                    text = self._readable(checked)
                if made and is_other(given, text):
                    raise ValueError(
                        "its model changes numbers or texts of it again when it is enqueued: let validators leave as "
                        "it is what they have made before, or make it anew of what was changed in it"
                    )
                if STAR in text and MASK in text and masks_secret(self._dump(checked)):
                    raise ValueError(
                        "it holds a secret (SecretStr), of which JSON gets asterisks: give the field a serializer that "
                        "reveals it, or a name by which the handler finds it"
                    )
                if may_have_keys and HALF[0] in text and HALF in text and self._has_half_characters(checked):
                    raise ValueError("it holds a key with half a character (a lone surrogate): correct its decoding")
                if len(text) > _LONG and (too_much := too_much_in(checked, text, nested=self._may_be_nested)):
                    raise ValueError(too_much)
                lacking = may_hold_nan and (b"null" in text or b"NaN" in text or b"Infinity" in text)
                if lacking and self._loses_numbers(checked, text):
                    raise ValueError(_NO_NUMBER)
                if may_be_other and (other := self._other_in(checked, text)):
                    raise ValueError(other)
                texts.append(text)
            except (ValidationError, ValueError, TypeError) as error:
                raise InvalidPayload(
                    f"the payload of {self._type_name!r} does not fit its model: {told(error)}"
                ) from error
            notes.append(note(checked))
        return notes, texts

    def _readable(self, checked: P) -> bytes:
        """Of what is not of the types that a dataclass names, since nobody looks when it is made: its JSON, if the
        handler can read it (a Decimal that was set as a float)."""
        text = self._to_json(checked, round_trip=True, by_alias=False)
        self.load(text.decode())
        if self._loses_numbers(checked, text):  # in a field that is declared as something else
            raise ValueError(_NO_NUMBER)
        return text

    @cached_property
    def _warn(self) -> Literal[True, "error"]:
        return "error" if any(map(is_dataclass, self._classes)) else True  # which takes a microsecond less

    @cached_property
    def _may_hold_floats(self) -> bool:
        return may_hold_floats(self._adapter.core_schema)

    @cached_property
    def _may_become_another(self) -> bool:
        schema = self._adapter.core_schema
        return bool(self._in_doubt) or may_become_another(schema) or may_be_unreadable(schema)

    @cached_property
    def _may_be_nested(self) -> bool:
        return may_be_nested(self._adapter.core_schema)

    @cached_property
    def _may_have_keys(self) -> bool:
        return may_have_keys(self._adapter.core_schema)

    def _has_half_characters(self, checked: P) -> bool:
        return has_half_characters(self._held_by(checked))

    @cached_property
    def _in_doubt(self) -> dict[type, dict[str, bool]]:
        return fields_in_doubt(self._adapter.core_schema)

    @cached_property
    def _left_out(self) -> LeftOut:
        return fields_left_out(self._adapter.core_schema)

    @cached_property
    def _classes(self) -> frozenset[type]:
        return classes_in(self._adapter.core_schema)

    @cached_property
    def _may_change(self) -> bool:
        return may_change(self._adapter.core_schema)

    @cached_property
    def _may_run_again(self) -> bool:
        return self._may_change and runs_again(self._adapter.core_schema)

    def _other_in(self, checked: P, text: bytes) -> str:
        """What the handler would get in place of what is here; empty where it is the same."""
        try:
            read = self.load(text.decode())
        except (ValueError, TypeError):
            raise
        except Exception as error:  # of a function of the model's, as one that chooses from a union
            raise ValueError(f"the handler could not read it: {error!r}") from error
        if self._may_become_another:
            declared = self._in_doubt.get(ROOT)
            kind = "" if declared is None else other_kind(checked, read, all(declared.values()))
            if other := kind or becomes_another(checked, read, self._classes, self._in_doubt, self._left_out):
                return f"it holds {other}"
        if not self._may_change:
            return ""
        again = self._to_json(read, round_trip=True, by_alias=False)
        if again == text or not is_changed(checked, read, self._classes):
            return ""
        # A text that was set past the validators, as by `model_copy`, may be put in order once, as by stripping it. A
        # number may not: nobody knows whether they had made it, as 1.5 of 150 %, of which they make 0.015 now. What a
        # serializer has rounded is not changed by reading it.
        if (
            not is_changed(checked, read, self._classes, tidied=True) or same_but_for_order(text, again)
        ) and not is_changed(read, self.load(again.decode()), self._classes):
            return ""
        names = changed_fields(checked, read, self._classes)
        return (
            f"the handler would get other values{names and f' of {names}'}, for its model changes them when they are "
            "read: let validators, and what runs when it is made, leave as it is what they have made before, times be "
            "written as texts (without ser_json_temporal), and no alias be the name of another field or value"
        )

    def _loses_numbers(self, checked: P, text: bytes) -> bool:
        """Whether the handler would find None where there is a float that JSON has no form for; or Postgres what is no
        JSON, which spoils the transaction."""
        if (b"NaN" in text or b"Infinity" in text) and not _is_json(text):  # in a text they may well stand
            return True
        if b"null" not in text:
            return False
        held = not_finite(self._held_by(checked))
        return held > 0 and held > not_finite(self._held_by(self.load(text.decode())))

    def _held_by(self, checked: P) -> object:
        return held_by(self._dump(checked))

    def _dump(self, checked: P) -> Callable[..., object]:
        return partial(self._adapter.dump_python, checked, round_trip=True)


def _is_json(text: bytes) -> bool:
    try:
        from_json(text, allow_inf_nan=False)
    except ValueError:
        return False
    return True
