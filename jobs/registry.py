"""The registry: job types are declared with its decorators, and services include it."""

import inspect
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Never, cast, get_args, get_origin, get_type_hints
from weakref import WeakSet

from ..errors import ConfigurationError, EnqueueError, UnknownJobType
from ..schema import valid_schema_name
from .connections import AnyConnection, AnySyncConnection
from .enqueue import short
from .groups import GroupOf
from .handlers import check_listed, check_no_method, model_of, why_not_called
from .job import Job, JobId, P
from .job_type import Handler, JobType, PolicyName
from .middleware import Middleware
from .periodic import Missed, Per, Tick, periodic_of
from .retry import Retry
from .transaction import Transaction, noted

__all__ = ["Registry"]


class Registry:
    """A set of job types without a service, for modules that services include::

        jobs = Registry()

        @jobs.job(group="order_id")
        async def ship(job: Job[Shipment]) -> None: ...

        service.include(jobs)

    `job` and `periodic` are those of a `Service`.

    Args:
        schema: Where the jobs are stored. Default: that of the service that includes the registry; of none,
            ``sidings``. Give it where a process enqueues that includes the registry in no service.

    Raises:
        ConfigurationError: Postgres would not take that name without quotes.
    """

    def __init__(self, *, schema: str | None = None) -> None:
        self._given = None if schema is None else valid_schema_name(schema)
        self._schema = self._given  # or an includer's
        self.has_grown: Callable[[str], bool] = lambda _: False  # the service knows which topics got more partitions
        self.middleware: list[Middleware] = []  # of the service, the outermost first
        self.batch_sizes: dict[str, int] = {}  # of the types whose handlers take lists
        self.limits: dict[str, int] = {}  # of the types that have one: how many handlers may run at once
        self._types: dict[str, JobType[Any]] = {}
        self._included: list[Registry] = []
        self._includers: WeakSet[Registry] = WeakSet()  # weak: of a module's registry each test may make a service

    @property
    def schema(self) -> str:
        """The schema that jobs of its types are stored in."""
        return self._schema or "sidings"

    def job(
        self,
        *misplaced: Never,
        name: str | None = None,
        payload: Any = None,
        group: GroupOf[Any] = None,
        retry: Retry | None = None,
        timeout: float | timedelta | None = None,
        history: bool = True,
        transactional: bool = False,
        home: str | None = None,
        policy: PolicyName = "serial",
        batch: int | None = None,
        concurrency: int | None = None,
    ) -> Callable[[Handler[P]], JobType[P]]:
        """Declare a job type::

            @service.job(group="order_id", timeout=30)
            async def ship(job: Job[Shipment]) -> None: ...

        The handler is ``async def``, or a plain function, which runs in a thread.

        Args:
            name: Default: the function's name. It is stored with every job, so keep it when you rename the function.
            payload: The model. Default: the parameter of the handler's ``Job[...]`` annotation.
            group: Name of a payload field, or a function of the payload. Jobs of one origin and group run one at a
                time, in order. Without it every job stands alone.
            retry: Default `Retry()`: exponential backoff with jitter, for ever.
            timeout: Seconds, or a timedelta, after which an attempt is cancelled and counts as failed. None: any time.
                Of a transactional attempt the time counts while its handler runs, not while Postgres begins or ends it.
                A plain function cannot be interrupted: it keeps its group until it returns.
            history: Whether attempts of this type leave rows in `job_history`. One that is discarded or followed always
                does, with its payload.
            transactional: The handler gets `job.tx`, a transaction that also ends the job: what it writes there happens
                exactly once. It must not commit by itself, has to await what it starts with `job.tx`, and holds a
                connection while it runs.
            home: A topic. The jobs belong to that partition of it which has their group as its key, wherever they are
                enqueued. So jobs that come from messages of several topics, from HTTP requests or from timers meet.
            policy: How the jobs of one group relate. ``"serial"``: one at a time, in order, whatever their types.
                ``"latest"``: as serial, but of this type's jobs that wait in the group only the newest runs; the others
                end as superseded, and it inherits their failures. With a `delay` it debounces. ``"parallel"``: the
                group orders nothing; it is there to be seen, paused and cleared by.
            batch: 2 to 500: the handler takes ``list[Job[...]]``, up to so many jobs of one origin, no two of a group
                unless the policy is ``"parallel"``. It returns None when all have succeeded, or for each job, in their
                order, None or an error (``Discard(...)`` and ``Retry.after(...)`` as well), as
                ``asyncio.gather(..., return_exceptions=True)`` does. What it raises has failed them all. A job that has
                failed once is given to it alone, so that a bad one spoils no other's second attempt.
            concurrency: How many of its handlers may run at once in one instance, as where a carrier takes no more
                calls. The others wait as jobs; their `timeout` has not begun. None: as many as there are workers.

        Returns:
            A decorator, which makes a `JobType` of the handler.

        Raises:
            ConfigurationError: The declaration cannot work. The decorator raises it too.
        """
        if misplaced:  # without parentheses, the handler itself
            raise ConfigurationError(
                f"job({_named(misplaced[0])}): write @service.job(), and what you give it by name, as in "
                "@service.job(group='order_id')"
            )
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        real = isinstance(seconds, int | float)  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be unchecked
        if seconds is not None and not (real and seconds > 0):
            raise ConfigurationError(f"timeout={timeout!r}: give a positive number of seconds, or None")
        for option, value in {"history": history, "transactional": transactional}.items():
            if not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigurationError(f"{option}={value!r}: give True or False")

        def declare(handler: Handler[P]) -> JobType[P]:
            label = name or getattr(handler, "__name__", "")
            if not isinstance(label, str):
                raise ConfigurationError(f"name={label!r}: give a text")
            if not label:
                raise ConfigurationError(f"{handler!r} has no __name__: give name=...")
            try:
                short("name", label)
            except EnqueueError as error:
                raise ConfigurationError(str(error)) from None
            check_no_method(handler, label, "service.job()")
            check_listed(handler, label, Job, batch)
            model = model_of(handler, label, Job, batch is not None, "payload") if payload is None else payload
            _check_handler(handler, label)
            return self.add(
                JobType(
                    self,
                    handler,
                    name=label,
                    payload=model,
                    group=group,
                    retry=Retry.given(retry, label) or Retry(),
                    timeout=seconds,
                    history=history,
                    transactional=transactional,
                    home=home,
                    policy=policy,
                    batch=batch,
                    concurrency=concurrency,
                )
            )

        return declare

    def periodic(
        self,
        cron: str | None = None,
        *,
        every: timedelta | float | None = None,
        timezone: str | None = None,
        missed: Missed = "once",
        per: Per = "service",
        home: str | None = None,
        name: str | None = None,
        retry: Retry | None = None,
        timeout: float | timedelta | None = None,
        history: bool = True,
        transactional: bool = False,
        concurrency: int | None = None,
    ) -> Callable[[Handler[Tick]], JobType[Tick]]:
        """Declare a job type with a schedule: each of its ticks becomes one job, whichever instance fires it::

            @service.periodic("0 6 * * *", timezone="Europe/Tallinn")
            async def nightly(job: Job[Tick]) -> None: ...

        Ticks never overlap: they are one group, and with "once" and "skip" a tick waits until the job of the one before
        has ended. See docs/periodic.md.

        Args:
            cron: Minute, hour, day of the month, month, day of the week, as cron reads them.
            every: Instead of `cron`, a period in seconds, or a timedelta.
            timezone: Of `cron`. Default: UTC.
            missed: What becomes of ticks that nobody fired in time. ``"once"``: one job stands for all of them.
                ``"skip"``: what is more than a minute late gets no job. ``"all"``: a job for each.
            per: ``"origin"``: a job in every origin, instead of one for the service; not together with `home`.
            home: As in `job`; so are `name`, `retry`, `timeout`, `history`, `transactional` and `concurrency`.

        Returns:
            A decorator, which makes a `JobType` of the handler.

        Raises:
            ConfigurationError: The declaration cannot work. The decorator raises it too.
        """
        if cron is not None and not isinstance(cron, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            # Without parentheses this is the handler, and nothing would be declared.
            raise ConfigurationError(
                f'periodic({_named(cron)}): give a cron expression, as in @service.periodic("0 6 * * *"), or '
                "every=, in seconds"
            )

        def declare(handler: Handler[Tick]) -> JobType[Tick]:
            label = name or getattr(handler, "__name__", "")
            periodic = periodic_of(label, cron, every, timezone, missed, per)
            check_no_method(handler, label, "service.periodic(...)")
            _check_ticks(handler, label)
            if per == "origin" and home is not None:
                raise ConfigurationError(f"{label}: home={home!r} and per='origin' exclude each other")
            _check_follow_up(Retry.given(retry, label), label)
            job_type = self.job(
                name=label,
                payload=Tick,
                group=lambda _: label,
                retry=retry,
                timeout=timeout,
                history=history,
                transactional=transactional,
                home=home,
                concurrency=concurrency,
            )(handler)
            job_type.periodic = periodic
            return job_type

        return declare

    def add(self, job_type: JobType[P]) -> JobType[P]:
        """Register a type, here and where this registry is included.

        Raises:
            ConfigurationError: Its name is taken.
        """
        if self._types.get(job_type.name, job_type) is not job_type:
            raise ConfigurationError(f"two job types are called {job_type.name!r}: give one of them name=...")
        if job_type.batch is not None:
            self.batch_sizes[job_type.name] = job_type.batch
        if job_type.concurrency is not None:
            self.limits[job_type.name] = job_type.concurrency
        self._types[job_type.name] = job_type  # last: this may be another thread than that of an executor
        for includer in self._includers:
            includer.add(job_type)
        return job_type

    def include(self, other: "Registry") -> None:
        """Take over the types of `other`, also those that it declares or includes later; no middleware, which a
        service's own registry has.

        From now on they enqueue into this registry's schema, if it has one. So a registry serves one service of a
        process at a time: another service, with another schema, that has included it before does not start any more.

        Raises:
            ConfigurationError: `other` includes this one, has a type whose name is taken here, or was given another
                schema.
        """
        if not isinstance(other, Registry):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be unchecked
            raise ConfigurationError(f"include({_named(other)}): give a Registry, such as a module's `jobs`")
        if other._leads_to(self):
            raise ConfigurationError("a registry cannot include itself, nor one that includes it: include each once")
        if self._schema is not None:
            other._refuse_other_than(self._schema)
        for job_type in other:
            self.add(job_type)
        self._included.append(other)
        other._includers.add(self)
        other._belong_to(self)

    def _leads_to(self, registry: "Registry") -> bool:
        return self is registry or any(included._leads_to(registry) for included in self._included)

    def _refuse_other_than(self, schema: str) -> None:
        if self._given not in (None, schema):
            raise ConfigurationError(
                f"include(): the registry was made with schema={self._given!r}, and what includes it stores jobs in "
                f"{schema!r}: give both the same, or leave it out of Registry()"
            )
        for included in self._included:
            included._refuse_other_than(schema)

    def _belong_to(self, includer: "Registry") -> None:
        self._schema, self.has_grown = self._given or includer._schema or self._schema, includer.has_grown
        for included in self._included:
            included._belong_to(self)

    def get(self, name: str) -> JobType[Any] | None:
        """The type of that name, or None."""
        return self._types.get(name)

    def __getitem__(self, name: str) -> JobType[Any]:
        """The type of that name.

        Raises:
            UnknownJobType: There is none; the message names those that there are.
        """
        try:
            return self._types[name]
        except KeyError:
            known = ", ".join(sorted(self._types)) or "none"
            raise UnknownJobType(
                f"no job type {name!r} is registered (known: {known}): "
                "declare it with @service.job, or include its registry"
            ) from None

    @noted
    async def enqueue(self, tx: Transaction | AnyConnection, type_name: str, payload: Any, **options: Any) -> JobId:
        """`JobType.enqueue` by name.

        Args:
            options: The keyword arguments of `JobType.enqueue`.

        Raises:
            UnknownJobType: No type of that name is registered. Other errors are those of `JobType.enqueue`.
        """
        return await self[type_name].enqueue(tx, payload, **options)

    def enqueue_sync(self, connection: AnySyncConnection, type_name: str, payload: Any, **options: Any) -> JobId:
        """`JobType.enqueue_sync` by name.

        Args:
            options: The keyword arguments of `JobType.enqueue_sync`.

        Raises:
            UnknownJobType: No type of that name is registered. Other errors are those of `JobType.enqueue_sync`.
        """
        return self[type_name].enqueue_sync(connection, payload, **options)

    def check_follow_ups(self) -> None:
        """Look for the type that follows each one (`Retry(on_exhausted=)`), as before any job runs.

        Raises:
            ConfigurationError: One is missing here; the message says what to do.
        """
        for job_type in self:
            follow_up = job_type.retry.follow_up
            if follow_up is not None and self.get(follow_up.name) is not follow_up:
                raise ConfigurationError(
                    f"a job of {job_type.name!r} that is given up is followed by one of {follow_up.name!r}, which "
                    "would wait for ever, as that is no job type here: include(...) the registry that declares it"
                )

    def silent(self) -> list[str]:
        """Names of the types that leave no history."""
        return [job_type.name for job_type in self if not job_type.history]

    def __iter__(self) -> Iterator[JobType[Any]]:
        return iter(list(self._types.values()))  # a copy: another thread may declare one meanwhile

    def __len__(self) -> int:
        return len(self._types)


def _named(given: object) -> str:
    return getattr(given, "__name__", repr(given))


def _check_handler(handler: Callable[..., object], label: str) -> None:
    """A handler that could only fail, or that would do nothing and pass for a success, is refused where it stands."""
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise ConfigurationError(f"{label}: the handler has a `yield`: calling it runs nothing; take the yield out")
    if why := why_not_called(handler, 1):
        raise ConfigurationError(
            f"{label}: the handler is called with one argument, a job or a list of jobs, and cannot be: {why}"
        )


def _check_ticks(handler: Callable[..., object], label: str) -> None:
    try:
        hints = [hint for name, hint in get_type_hints(handler).items() if name != "return"]
    except (NameError, TypeError):
        return  # an annotation that cannot be resolved, or looked at, says nothing wrong
    if hints and get_origin(hints[0]) is Job and get_args(hints[0])[0] not in (Tick, Any):
        raise ConfigurationError(f"{label}: the payload of a periodic job is a Tick: annotate its handler: Job[Tick]")


def _check_follow_up(retry: Retry | None, label: str) -> None:
    """What follows a tick would stand in the group of the ticks, and while it fails they would wait behind it."""
    follow_up = cast(JobType[Any] | None, retry and retry.follow_up)
    if follow_up is not None and follow_up.grouped and follow_up.periodic is None:
        raise ConfigurationError(
            f"{label}: on_exhausted={follow_up.name} has groups, and would keep the ticks of {label} waiting while it "
            "fails: leave group= out there"
        )
