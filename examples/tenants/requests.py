"""Does a request once, however often it arrives, and answers when Kafka has acknowledged what it has published."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any
from uuid import UUID

from fastapi import Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, TypeAdapter
from sidings import NotPublished, PostgresUnavailable, Receipt, Service, Transaction

from .crash import crash_point
from .events import Problem, RequestId

__all__ = [
    "EXCEPTIONS",
    "MISSING",
    "REFUSED",
    "TAKEN",
    "Answer",
    "IdempotencyKey",
    "KeyReused",
    "NotAcknowledged",
    "Requests",
    "Responses",
    "one_key",
]

log = logging.getLogger("examples.tenants")

_RECEIPT = TypeAdapter(Receipt)
_SWEEP_SECONDS = 30.0
_LOOK_SECONDS = 0.1


IdempotencyKey = Annotated[RequestId | None, Header(alias="Idempotency-Key")]
Responses = dict[int | str, dict[str, Any]]  # as FastAPI wants them
REFUSED: Responses = {400: {"model": Problem}, 422: {"model": Problem}, 503: {"model": Problem}}
MISSING: Responses = {404: {"model": Problem}}
TAKEN: Responses = {409: {"model": Problem}}


class KeyReused(Exception):
    """The idempotency key stands for another request."""


class NotAcknowledged(Exception):
    """It is committed, but Kafka has not acknowledged the event yet. Repeating the request waits for it again."""


@dataclass(frozen=True)
class Answer:
    """What a request is answered. body: JSON text. entity: whose events have to be acknowledged before."""

    status: int
    body: str | None = None
    entity: UUID | None = None

    @classmethod
    def of(cls, status: int, model: BaseModel, entity: UUID | None = None) -> "Answer":
        """With a model as its body."""
        return cls(status, model.model_dump_json(), entity)

    @classmethod
    def problem(cls, status: int, detail: str) -> "Answer":
        """That it was not done, and why."""
        return cls.of(status, Problem(detail=detail))

    def response(self) -> Response:
        """For FastAPI."""
        return Response(self.body, self.status, media_type=None if self.body is None else "application/json")


class Requests:
    """What all verticals of the API share. acknowledge_seconds: how long an answer may wait for Kafka."""

    def __init__(self, service: Service, acknowledge_seconds: float) -> None:
        self.service = service
        self._seconds = acknowledge_seconds

    async def once(
        self, work: Callable[[Transaction], Awaitable[Answer]], *, key: str | None = None, digest: str = ""
    ) -> Answer:
        """Do `work` in a transaction and return its answer when its events are acknowledged.

        With a key: a request with the same key and digest gets the same answer without being done again; while the
        first one is under way, the others wait for it. Raises `KeyReused`, `NotAcknowledged`, `PostgresUnavailable`.
        """
        async with self.service.transaction() as tx:
            answer = None if key is None else await _claim(tx, key, digest)
            if answer is None:
                answer = await work(tx)
                if key is not None:
                    await tx.execute(
                        "UPDATE tenants_api.request SET status = $2, answer = $3, entity = $4 WHERE key = $1",
                        *(key, answer.status, answer.body, answer.entity),
                    )
            crash_point("api: before the commit")
        crash_point("api: committed")
        if answer.entity is not None:
            await self.acknowledged(answer.entity)
        crash_point("api: acknowledged")
        return answer

    async def publish(
        self,
        tx: Transaction,
        entity: UUID,
        topic: str,
        *,
        key: UUID,
        value: BaseModel | None,
        headers: dict[str, str],
        partition_key: UUID | None = None,
    ) -> None:
        """Publish an event about an entity, and remember that its acknowledgement has to be waited for."""
        receipt = await self.service.outbox.publish(
            tx,
            topic,
            key=str(key),
            value=value,
            headers=headers,
            partition_key=None if partition_key is None else str(partition_key),
        )
        await tx.execute(
            "INSERT INTO tenants_api.unacknowledged (entity, receipt) VALUES ($1, $2)",
            *(entity, _RECEIPT.dump_json(receipt).decode()),
        )

    async def acknowledged(self, entity: UUID) -> None:
        """Return when Kafka has acknowledged all events about this entity.

        Raises `NotAcknowledged`, also where Kafka refuses an event: then it is parked, and waits for a person.
        """
        query = "SELECT id, receipt FROM tenants_api.unacknowledged WHERE entity = $1 ORDER BY id"
        async with self.service.transaction() as tx:
            rows = await tx.fetch(query, entity)
        try:
            async with asyncio.timeout(self._seconds):
                for row in rows:
                    await self._published(row["id"], _RECEIPT.validate_json(row["receipt"]))
        except (TimeoutError, NotPublished) as error:
            raise NotAcknowledged(f"it is stored, but Kafka has not acknowledged it yet: {error}") from error
        if rows:
            async with self.service.transaction() as tx:
                await tx.execute("DELETE FROM tenants_api.unacknowledged WHERE id = ANY ($1)", [r["id"] for r in rows])

    async def _published(self, id: int, receipt: Receipt) -> None:
        """Return when Kafka has acknowledged what `receipt` stands for, also where Postgres has crashed since it was
        made, or was replaced: `published` cannot tell then whether the event was kept. But where the receipt is there,
        the event was, for they were stored together; and it has left when it neither waits nor is parked."""
        try:
            await self.service.outbox.published(receipt)
            return
        except (PostgresUnavailable, NotPublished) as error:
            problem = error
        query = """
            SELECT EXISTS (SELECT FROM sidings_api.outbox o WHERE o.slot = ANY ($2) AND o.id = ANY ($3)) AS waiting,
                   EXISTS (SELECT FROM sidings_api.outbox_parked p WHERE p.id = ANY ($3)) AS parked
            FROM tenants_api.unacknowledged WHERE id = $1
        """
        while True:
            async with self.service.transaction() as tx:
                row = await tx.fetchrow(query, id, receipt.slots, receipt.ids)
            if row is None or row["parked"]:  # none: another request has seen to it, or it is lost after all
                raise NotPublished(str(problem)) from problem
            if not row["waiting"]:
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def sweep(self) -> None:
        """Forget the acknowledgements that somebody died waiting for; try again while there are some that do not
        come."""
        while not await self._swept():
            await asyncio.sleep(_SWEEP_SECONDS)

    async def _swept(self) -> bool:
        done = True
        try:
            async with self.service.transaction() as tx:
                rows = await tx.fetch("SELECT DISTINCT entity FROM tenants_api.unacknowledged")
            for row in rows:
                try:
                    await self.acknowledged(row["entity"])
                except NotAcknowledged as error:
                    done = False
                    log.warning("an earlier event about %s: %s", row["entity"], error)
        except PostgresUnavailable as error:
            done = False
            log.warning("earlier events cannot be looked at: %s", error)
        return done


async def _claim(tx: Transaction, key: str, digest: str) -> Answer | None:
    """None: the key is ours. Otherwise the answer that stands for it. Waits for a transaction that claims it too. A key
    is kept for a day."""
    await tx.execute(
        """
        DELETE FROM tenants_api.request r USING (
            SELECT key FROM tenants_api.request WHERE made_at < now() - interval '1 day' LIMIT 20 FOR UPDATE SKIP LOCKED
        ) old WHERE r.key = old.key
        """
    )
    query = "INSERT INTO tenants_api.request (key, digest) VALUES ($1, $2) ON CONFLICT DO NOTHING RETURNING true"
    if await tx.fetchval(query, key, digest):
        return None
    row = await tx.fetchrow("SELECT digest, status, answer, entity FROM tenants_api.request WHERE key = $1", key)
    if row is None or row["digest"] != digest:
        raise KeyReused(f"the idempotency key {key!r} stands for another request: take a new one")
    return Answer(row["status"], row["answer"], row["entity"])


def one_key(header: str | None, in_body: str | None) -> str | None:
    """The idempotency key, from wherever it is given. Raises `KeyReused` for two different ones."""
    if header is not None and in_body is not None and header != in_body:
        raise KeyReused(f"Idempotency-Key: {header!r} contradicts request_id: {in_body!r}; give one of them")
    return header or in_body


# -- what exceptions are answered -------------------------------------------------------------------------------------


def _problem(status: int, error: object, **headers: str) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, status, headers)


async def _unprocessable(_: Request, error: Exception) -> JSONResponse:
    return _problem(422, error)


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return _problem(422, "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()))


async def _unavailable(_: Request, error: Exception) -> JSONResponse:
    return _problem(503, error, **{"Retry-After": "1"})


EXCEPTIONS = {
    KeyReused: _unprocessable,
    RequestValidationError: _invalid,
    NotAcknowledged: _unavailable,
    PostgresUnavailable: _unavailable,
}
