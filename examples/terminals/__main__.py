"""``python -m examples.terminals``: about half a minute. Exits 0 only if every payment was decided as it should be."""

import asyncio
import logging
import os
import signal
import sys

from sidings.devstack import DevstackError

from .stage import Servers, reference_data, servers, topics
from .story import Story


async def tell(ends: Servers) -> list[str]:
    """The story; what was wrong in it."""
    async with topics(ends.kafka) as names, reference_data(ends, names.directory):
        story = Story(ends, names)
        await story.tell()
        return story.broken


def main() -> int:
    """Run it; the exit code."""
    logging.basicConfig(level=logging.CRITICAL)  # Postgres is killed: its absence is in everybody's log
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has ignored by what it starts with `&`
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))  # the same orderly end
    print("Starting Postgres and Kafka ...", flush=True)
    try:
        with servers() as ends:
            broken = asyncio.run(tell(ends))
    except KeyboardInterrupt:
        print("Stopped; the servers are gone.")
        return 130
    except (DevstackError, TimeoutError) as error:
        print(f"It broke down: {error}")
        return 1
    print("\n".join(broken) if broken else "Payments went on, whatever became of Postgres.")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
