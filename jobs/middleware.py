"""What a service wraps around every handler: an onion of async functions, the first one outermost."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any, NoReturn, Protocol, TypeGuard, cast

from ..errors import ConfigurationError
from .job import Job
from .transaction import Transaction

__all__ = [
    "Call",
    "Middleware",
    "Next",
    "call_through",
    "check_middleware",
    "completed",
    "error_in",
    "is_async",
    "is_error",
]


_ITEMS = (list, tuple, set, frozenset)  # asyncio.wait returns two sets in a tuple
_MAY_NOT_HAVE_RUN = (Generator, AsyncGenerator, Awaitable, Future)
_NOT_CALLED = (FunctionType, MethodType, partial)  # as of a decorator without its parentheses
_LEVELS = 4  # of what such hold that is looked at


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a handler, as a middleware sees it.

    Attributes:
        name: The job type, or the topic of a consumer.
        origin: ``topic/partition``.
        jobs: What a job's handler gets: one, or several where it takes lists. Empty for a consumer.
        messages: The `Message` objects that a consumer's handler gets. Empty for a job.
        tx: The transaction of a consumer or of a transactional job; None elsewhere.
    """

    name: str
    origin: str
    jobs: Sequence[Job[Any]] = ()
    messages: Sequence[Any] = ()
    tx: Transaction | None = None


class Next(Protocol):
    """What a middleware gets to call: the next middleware, or at last the handler, whose result it returns."""

    def __call__(self) -> Awaitable[object]: ...


Middleware = Callable[[Call, Next], Awaitable[object]]


async def call_through(
    middleware: Sequence[Middleware], call: Call, handler: Next, *, judged: bool = False, listed: bool = False
) -> object:
    """Call `handler` inside of all of these, and return what it returned. judged, listed: as in `completed`.

    What the handler returns or raises is what counts; a middleware changes it only by raising something else. So none
    can make a failed job, or one that has not run, pass for a successful one by mistake.
    Raises `RuntimeError` if one of them has not called the next when it returns, or calls it twice. Once this has
    returned or raised, no `call_next()` begins anything any more: it raises `RuntimeError`.
    """
    is_over = False

    def refuse() -> NoReturn:
        raise RuntimeError(
            f"the call of {call.name} is over: a middleware ended before its call_next() did; let it `await "
            "call_next()` itself, and run what goes beside that in a task of its own"
        )

    async def layer(number: int) -> object:
        if is_over:  # one further in has not been waited for: by now another attempt may run, or another job
            refuse()
        if number < len(middleware):
            return await _run(middleware[number], call, partial(layer, number + 1))
        result = await handler()
        if is_over and isinstance(result, Coroutine):  # of an `async def` behind a plain wrapper: it has not begun
            result.close()
            refuse()
        return await completed(result, judged=judged, listed=listed)

    try:
        return await layer(0)
    finally:
        is_over = True


async def completed(result: object, *, judged: bool = False, listed: bool = False) -> object:
    """What a handler comes to, of which this was returned: behind a decorator that does not await it, it has not begun
    when that returns; nor need what it has handed to threads or another event loop have ended. An error that it
    returns, by itself or in a list, it means to raise: nothing has succeeded. judged: it is handed on, to a retry
    policy that judges what handlers return. listed: a list is handed on, of which each item is one job's."""
    if _is_plain(type(result)):  # mostly None: this is asked of each message
        return result
    while inspect.isawaitable(result) or isinstance(result, Future):
        result = await (asyncio.wrap_future(cast("Future[object]", result)) if isinstance(result, Future) else result)
    if isinstance(result, _NOT_CALLED):
        kind = type(cast(object, result)).__name__
        raise TypeError(
            f"the handler returned a {kind}, which nobody calls: call it; where a decorator stands without its "
            "parentheses, write @timed() for @timed"
        )
    if (error := not_run(result)) is not None:
        raise error
    if not judged and (returned := error_in(result, listed=listed)) is not None:
        raise returned
    return result


def not_run(result: object) -> BaseException | None:
    """What to raise where a handler has returned this, or a list, set or dict with it, which has not run, or not ended:
    its job would pass for done."""
    level: list[object] = [result]
    seen: dict[int, object] = {}
    for _ in range(_LEVELS):
        kinds = set(map(type, level))  # of many rows, be there ever so many, none is looked at by itself
        if all(map(_is_plain, kinds)):
            break
        if any(issubclass(kind, _MAY_NOT_HAVE_RUN) for kind in kinds):
            found = list(filter(None, map(_of_one, level)))
            if found:
                return found[0]
        dicts, others = (_of_kinds(level, kinds, of, seen) for of in (dict, _ITEMS))
        level = [*chain.from_iterable([*map(cast(Any, dict).values, dicts), *others])]
    return None


@lru_cache
def _is_plain(kind: type) -> bool:
    """Whether such a result can neither be, nor hold, what has not run, and is no error."""
    return not issubclass(kind, (dict, *_ITEMS, *_MAY_NOT_HAVE_RUN, *_NOT_CALLED, BaseException, type))


def _of_kinds(level: list[object], kinds: set[type], of: Any, seen: dict[int, object]) -> list[Any]:
    """Each once: rows may all hold what holds them."""
    wanted = {kind for kind in kinds if issubclass(kind, of)}
    items = [each for each in level if type(each) in wanted] if wanted else []
    found = dict(zip(map(id, items), items, strict=True))
    new = [each for number, each in found.items() if number not in seen]
    seen |= found
    return new


def _of_one(result: object) -> BaseException | None:
    told = f"the handler returned a {type(result).__name__}"
    if isinstance(result, Generator | AsyncGenerator):
        return TypeError(f"{told}: to call what has a `yield` runs nothing; take the yield out, or go through it")
    if _has_ended(result):
        return None if result.cancelled() else result.exception()
    if inspect.isawaitable(result) or isinstance(result, Future):
        if inspect.iscoroutine(cast(object, result)):
            cast(Coroutine[Any, Any, Any], result).close()
        return TypeError(f"{told}: nobody waits for it; `await` it, several with asyncio.gather(...)")
    return None


def _has_ended(result: object) -> "TypeGuard[Future[object]]":
    return isinstance(result, asyncio.Future | Future) and cast("Future[object]", result).done()


def is_error(result: object) -> TypeGuard[BaseException | type[BaseException]]:
    """Whether this could be raised: an error, or a class of errors."""
    return isinstance(result, BaseException) or (isinstance(result, type) and issubclass(result, BaseException))


def error_in(result: object, *, listed: bool = False) -> BaseException | type[BaseException] | None:
    """The error that a handler has returned, or the first one in its list, as a gather gives it. listed: as in
    `completed`."""
    if is_error(result):
        return result
    if listed or not isinstance(result, list | tuple):
        return None
    items = cast(Sequence[object], result)
    kinds = {kind for kind in set(map(type, items)) if issubclass(kind, (BaseException, type))}  # as in `not_run`
    return next((each for each in items if type(each) in kinds and is_error(each)), None) if kinds else None


async def _run(middleware: Middleware, call: Call, inner: Next) -> object:
    """Run one of them around `inner`, whose end is the end of both, unless the middleware raises."""
    started = ended = False
    result: object = None
    raised: BaseException | None = None

    async def call_next() -> object:
        nonlocal started, ended, result, raised
        if started:
            raise RuntimeError(
                f"the middleware {_name(middleware)} called call_next() twice: leave retries to the policy"
            )
        started = True
        try:
            result = await inner()
        except BaseException as error:
            raised = error
            raise
        finally:
            ended = True
        return result

    await middleware(call, call_next)
    if raised is not None:
        raise raised
    if not ended:
        raise RuntimeError(
            f"the middleware {_name(middleware)} returned without await call_next(): raise Discard to end a job unrun"
        )
    return result


def is_async(function: object) -> bool:
    """Whether to call it gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    )


def check_middleware(middleware: Middleware) -> None:
    """Raises `ConfigurationError` for what cannot be one."""
    fits = is_async(middleware)
    try:
        inspect.signature(middleware, follow_wrapped=False).bind(None, None)
    except (TypeError, ValueError):  # ValueError: a partial with what its function does not take
        fits = False
    if not fits:
        raise ConfigurationError(
            f"the middleware {_name(middleware)} must be `async def {_name(middleware)}(call: Call, call_next: Next)`"
        )


def _name(middleware: Middleware) -> str:
    return getattr(middleware, "__qualname__", repr(middleware))
