"""What becomes of published messages, asked for all who wait for that with one statement at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, NamedTuple

import asyncpg

from ...errors import PostgresUnavailable
from .receipt import Receipt

if TYPE_CHECKING:
    from asyncpg import Record

__all__ = ["Inquiry"]

_AT_ONCE = 5_000  # messages


class _Question(NamedTuple):
    """Of one who waits. left: ids and slots of the messages of `receipt` that are not acknowledged yet."""

    receipt: Receipt
    left: dict[int, int]
    answer: "asyncio.Future[list[Record] | None]"


class Inquiry:
    """Asks for all who wait in one event loop, in a task of its own: who gives up, as a request whose client has hung
    up, takes nobody else's answer along, nor the connection. fetch: runs receipts.sql."""

    def __init__(self, fetch: "Callable[..., Awaitable[list[Record]]]") -> None:
        self._fetch = fetch
        self._questions: list[_Question] = []  # that have not been asked yet
        self._asking: asyncio.Task[None] | None = None

    async def rows(self, receipt: Receipt, left: dict[int, int]) -> "list[Record] | None":
        """Those of these messages; None where Postgres does not answer now."""
        question = _Question(receipt, left, asyncio.get_running_loop().create_future())
        self._questions.append(question)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.get_running_loop().create_task(self._ask(), context=Context())
        return await question.answer

    async def _ask(self) -> None:
        asked: list[_Question] = []
        try:
            while asked := self._some():
                await self._answer(asked)
        finally:  # cancelled, as by the end of asyncio.run: whoever waits all the same asks again
            for question in _waiting([*asked, *self._questions]):
                question.answer.set_result(None)
            self._questions.clear()

    async def _answer(self, asked: list[_Question]) -> None:
        answers: Sequence[list[Record] | None]
        try:
            answers = await self._answers(asked)
        except (PostgresUnavailable, asyncpg.LockNotAvailableError):  # somebody alters the table, say
            answers = [None] * len(asked)
        except Exception as error:  # noqa: BLE001 - that of who asks
            if isinstance(error, asyncpg.DataError) and (half := len(asked) // 2) > 0:
                await self._answer(asked[:half])  # one receipt that is none is no failure of the others'
                await self._answer(asked[half:])
            else:
                for question in _waiting(asked):
                    question.answer.set_exception(error)
            return
        for question, rows in zip(asked, answers, strict=True):
            if not question.answer.done():
                question.answer.set_result(rows)

    def _some(self) -> list[_Question]:
        """As many as one statement may ask, one at least; they wait no more."""
        waiting, count, messages = _waiting(self._questions), 0, 0
        while count < len(waiting) and (not count or messages + len(waiting[count].left) <= _AT_ONCE):
            messages += len(waiting[count].left)
            count += 1
        self._questions = waiting[count:]
        return waiting[:count]

    async def _answers(self, asked: list[_Question]) -> "Sequence[list[Record]]":
        each = [(number, question, id) for number, question in enumerate(asked) for id in question.left]
        rows = await self._fetch(
            "receipts",
            [id for _, _, id in each],
            [question.left[id] for _, question, id in each],
            [question.receipt.txid for _, question, _ in each],
            [question.receipt.subxid for _, question, _ in each],
        )
        answers: list[list[Record]] = [[] for _ in asked]
        for row in rows:
            answers[each[row["number"] - 1][0]].append(row)
        return answers


def _waiting(questions: Iterable[_Question]) -> list[_Question]:
    """Whose answer is still waited for."""
    return [question for question in questions if not question.answer.done()]
