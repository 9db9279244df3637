"""What all settings have in common: they are frozen, and what is wrong with them is told in one way."""

from difflib import get_close_matches
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator

from .errors import ConfigurationError

__all__ = ["Settings"]

# In place of what pydantic says in the words of Python's types.
_TOLD = {
    "dict_type": "give a table of names and values",
    "mapping_type": "give a table of names and values",
    "missing": "is missing",
    "tuple_type": "give a list",
}


class Settings(BaseModel):
    """A frozen model. What is wrong is told as a `ConfigurationError` that names each field, and no value: it may be
    a secret. NaN and infinity are no numbers here."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _checked(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            made = handler(values)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            told = (cls._told([str(part) for part in one["loc"]], one["type"], one["msg"]) for one in found)
            raise ConfigurationError(f"{cls.title(values)}: {'; '.join(told)}") from None
        made.check()
        return made

    def check(self) -> None:
        """Look at the fields together; each by itself is right.

        Raises:
            ConfigurationError: They cannot work.
        """

    @classmethod
    def title(cls, values: object) -> str:
        """What messages begin with; values: as they were given."""
        return cls.__name__

    @classmethod
    def named(cls, field: str) -> str:
        """What messages call a field."""
        return field

    @classmethod
    def unknown(cls, field: str) -> str:
        """What to say of a field that there is not."""
        close = get_close_matches(field, cls.model_fields, 1)
        return "there is no such field" + (f": is {close[0]} meant?" if close else "")

    @classmethod
    def _told(cls, where: list[str], kind: str, message: str) -> str:
        if not where:
            return f"give a table with the fields {', '.join(cls.model_fields)}"
        name = ".".join([cls.named(where[0]), *where[1:]])
        return f"{name}: {cls.unknown(where[0]) if kind == 'extra_forbidden' else _TOLD.get(kind, message)}"
