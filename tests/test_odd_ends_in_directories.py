"""Whatever a decoder, or a function that is told of changes, raises, a directory goes on: it would end the service, and
each start of it, with the same record."""

import pytest
from sidings import Message

from .directory_support import COMPACTED, Acquirer, a_directory, put, row
from .support import eventually


class Panic(BaseException):
    """What an extension written in Rust raises where it panics (PyO3): no `Exception`."""


@pytest.mark.parametrize("error", [Panic, GeneratorExit, SystemExit])
async def test_a_record_whose_decoder_raises_what_is_no_exception_is_a_bad_one(topic, sidings_kafka, error):
    name = await topic(config=COMPACTED)
    await put(sidings_kafka, name, {"T1": row("T1"), "T2": b"{}", "T3": row("T3")})

    def decode(message: Message[bytes]) -> Acquirer:
        if message.value == b"{}":
            raise error("odd")
        return Acquirer.model_validate_json(message.value)

    async with a_directory(name, sidings_kafka, decoder=decode) as terminals:
        assert sorted(terminals) == ["T1", "T3"]
        assert [bad.key for bad in terminals.errors()] == ["T2"]


async def test_a_callback_that_raises_what_is_no_exception_does_not_end_a_directory(topic, sidings_kafka):
    name = await topic(config=COMPACTED)
    await put(sidings_kafka, name, {"T1": row("T1")})
    async with a_directory(name, sidings_kafka) as terminals:

        @terminals.on_change
        def told(change: object) -> None:
            raise Panic("index out of bounds")

        await put(sidings_kafka, name, {"T2": row("T2")})
        await eventually(lambda: "T2" in terminals)
        await put(sidings_kafka, name, {"T3": row("T3")})
        await eventually(lambda: "T3" in terminals)
