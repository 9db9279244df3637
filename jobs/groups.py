"""The group of a job: what a type's `group=` gives for a payload, checked and as text."""

import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Generic, cast

from ..errors import ConfigurationError, EnqueueError, MissingGroup
from .job import P
from .lossy import holds_secret

__all__ = ["GroupOf", "Groups"]

GroupOf = str | Callable[[P], str | None] | None


class Groups(Generic[P]):
    """The groups of one type's jobs, `by` what was declared. `value` gives that of a payload before it is checked.

    name: of the type; group: as it was declared; payload: the model, whose instances have its fields.

    Raises `ConfigurationError`.
    """

    def __init__(self, name: str, group: GroupOf[P], payload: Any) -> None:
        self.value = _value_of(group, payload)
        self._name = name
        self.by = group
        fields = getattr(payload, "model_fields", None)
        if isinstance(group, str) and isinstance(fields, dict) and group not in fields:
            names = ", ".join(cast(dict[str, object], fields))
            if not hasattr(payload, group):
                raise ConfigurationError(f"{name}: group={group!r} is no field of its payload ({names})")

    def of(self, payload: P) -> str | None:
        """The group of a job with this payload; None where the type has no groups.

        Raises `MissingGroup`: the payload yields none, or none that reads the same each time.
        """
        return None if self.by is None else self._text(self.value(payload))

    def all_of(self, values: list[object]) -> list[str]:
        """The groups that `values` name, of a type with groups: checked as a whole; one by one only where that does not
        do. Raises `MissingGroup`."""
        if set(map(type, values)) <= {str} and "" not in values:
            return cast(list[str], values)
        return cast(list[str], [self._text(value) for value in values])  # which refuses what is empty

    def checked(self, group: str | None) -> str | None:
        """Refuse an empty group, and none where the type has groups.

        Raises:
            MissingGroup: The type has groups, and this is empty, or None.
            EnqueueError: The type has none, and this is empty: unrelated jobs would wait for each other in it.
        """
        if isinstance(group, str) and type(group) is not str:  # its class may have another text for it
            group = _text_of(group)
        if not group and self.by is not None:
            raise MissingGroup(
                f"{self._name!r} runs serially by group, but {self.by!r} gave {group!r}: fill that field, "
                "or declare the type without group="
            )
        if group == "":
            raise EnqueueError(
                f"the group of the job {self._name!r} is empty: give the key of its entity, or None for a job that "
                "stands alone"
            )
        return group

    def _text(self, value: object) -> str | None:
        value = value.value if isinstance(value, Enum) else value
        if value is None or isinstance(value, str):
            return self.checked(value)
        if holds_secret(value):
            raise MissingGroup(
                f"{self._name!r} runs serially by group, but {self.by!r} gave a secret, of which a group gets "
                "asterisks: let group= be a function that gives a hash of it"
            )
        text = self._decoded(value) if isinstance(value, bytes | bytearray) else _text_of(value)
        if isinstance(value, set | frozenset) or f"0x{id(value):x}" in text.lower() or inspect.isroutine(value):
            raise MissingGroup(
                f"{self._name!r} runs serially by group, but {self.by!r} gave {text}, which reads otherwise each "
                "time: let it give a text (call a method, or make it a property; and let it be no async function)"
            )
        return self.checked(text)

    def _decoded(self, value: bytes | bytearray) -> str:
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise MissingGroup(
                f"{self._name!r} runs serially by group, but {self.by!r} gave bytes that are no UTF-8 ({error}): "
                "let group= be a function of the payload that gives a text, such as their .hex()"
            ) from None


def _value_of(group: GroupOf[P], payload: Any) -> Callable[[P], object]:
    if inspect.iscoroutinefunction(group):  # its coroutine, as text, would be another group for each job
        raise ConfigurationError(f"group={group!r}: give a plain function of the payload, not an async one")
    if group is None or callable(group):
        return group or (lambda _: None)
    if not isinstance(group, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be unchecked
        raise ConfigurationError(f"group={group!r}: give the name of a field of the payload, or a function of it")
    if group in getattr(payload, "model_fields", ()):
        return lambda payload: getattr(payload, group, None)
    return lambda payload: (
        cast(Mapping[str, object], payload).get(group)
        if isinstance(payload, Mapping)
        else getattr(payload, group, None)
    )


def _text_of(value: object) -> str:
    """As JSON has it: of an enum's member, its value. Its text in Python may be its name, which nobody else knows."""
    value = value.value if isinstance(value, Enum) else value
    return str.__str__(value) if isinstance(value, str) else str(value)
