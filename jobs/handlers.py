"""What a handler says of itself, looked at where it is declared: else its first call would tell, in other words."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

from ..errors import ConfigurationError
from .job import Job
from .job_type import JobType

__all__ = ["bare", "check_listed", "check_no_method", "model_of", "why_not_called"]

_OBJECTS = ("self", "cls")


def bare(hint: Any) -> Any:
    """Without what `Annotated` says of it as a whole; within it that is the model's, as a discriminator."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def why_not_called(function: Callable[..., object], count: int) -> str | None:
    """Why it cannot be called with so many arguments by their place; None if it can. What else it takes may have been
    given, as by `partial` or a decorator. A decorator that takes whatever comes is believed to pass on just that."""
    try:
        own = inspect.signature(function, follow_wrapped=False)
        own.bind(*range(count))
    except (TypeError, ValueError) as error:  # ValueError: a partial with what its function does not take
        return str(error)
    if not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in own.parameters.values()):
        return None
    try:
        inspect.signature(function).bind(*range(count))
    except (TypeError, ValueError) as error:
        return f"{error} (if its decorator gives it that, name the decorator's parameters instead of taking *args)"
    return None


def check_no_method(handler: Callable[..., object], label: str, decorator: str) -> None:
    """A function in the body of a class would be called without its object; and what a decorator has made a job type is
    none any more. Raises `ConfigurationError`."""
    if isinstance(handler, JobType):
        raise ConfigurationError(f"{label}: {handler!r} is a job type already: write a function of its own")
    function = cast(object, handler.__func__ if isinstance(handler, classmethod) else handler)  # pyright: ignore[reportUnknownMemberType]
    if not inspect.isfunction(function) or next(iter(inspect.signature(function).parameters), "") not in _OBJECTS:
        return
    place = function.__qualname__.rpartition(".")[0]
    if place and not place.endswith("<locals>"):
        raise ConfigurationError(
            f"{label}: {function.__qualname__} is a method, and would be called without its object: write a function, "
            f"or declare the method of an object, as in {decorator}(an_object.{function.__name__})"
        )


def check_listed(
    handler: Callable[..., object], label: str, unit: type, batch: int | None, *, batches: bool = True
) -> None:
    """A handler whose annotation says that it takes a list, of jobs or messages, needs ``batch=``, and one that takes a
    single one must not have it. batches: whether it may. Raises `ConfigurationError`."""
    try:
        hint = _annotation(handler)
    except Exception:  # noqa: BLE001 - an annotation may be anything; what cannot be resolved says nothing wrong
        return
    one, many = f"{unit.__name__}[X]", f"{unit.__name__.lower()}s"
    if batch is None and get_origin(hint) is list and _is(bare(get_args(hint)[0]), unit):
        remedy = "give batch=, how many it may have, or " if batches else ""
        raise ConfigurationError(
            f"{label}: the handler takes a list of {many}: {remedy}annotate its first parameter as {one}"
        )
    if batch is not None and _is(hint, unit):
        raise ConfigurationError(
            f"{label}: with batch= the handler takes a list of {many}: annotate its first parameter as list[{one}], or "
            "leave batch= out"
        )


def model_of(handler: Callable[..., object], label: str, unit: type, batch: bool, option: str) -> Any:
    """X of the handler's ``unit[X]`` annotation, or ``list[unit[X]]`` of a batch; any of a mere `Job`. option: that
    names the model instead. Raises `ConfigurationError`."""
    one, many = f"{unit.__name__}[YourModel]", f"{unit.__name__.lower()}s"
    instead = f"give {option}=YourModel"
    remedy = f"annotate the handler's first parameter as {f'list[{one}]' if batch else one}, or {instead}"
    if not inspect.signature(handler).parameters:
        raise ConfigurationError(f"{label}: the handler takes no parameter; {remedy}")
    try:
        hint = _annotation(handler)
    except NameError as error:  # a model defined inside a function, under `from __future__ import annotations`
        raise ConfigurationError(f"{label}: the annotation cannot be resolved ({error}); {remedy}") from None
    except TypeError:  # functools.partial, or an object that can be called, has none
        raise ConfigurationError(f"{label}: {handler!r} has no annotations to look at; {instead}") from None
    if batch:
        if get_origin(hint) is not list:
            raise ConfigurationError(f"{label}: with batch= the handler takes a list of {many}; {remedy}")
        hint = bare(get_args(hint)[0])
    if hint is Job is unit:
        return Any
    if get_origin(hint) is not unit:
        raise ConfigurationError(f"{label}: the model of its {many} is unknown; {remedy}")
    return get_args(hint)[0]


def _annotation(handler: Callable[..., object]) -> Any:
    """That of its first parameter; None without one. It may raise anything, as annotations do."""
    first = next(iter(inspect.signature(handler).parameters), "")
    return bare(get_type_hints(handler, include_extras=True).get(first))


def _is(hint: Any, unit: type) -> bool:
    return unit in (cast(object, hint), get_origin(hint))
