"""Shows a running demo: a live picture on a terminal, plain lines everywhere else."""

import time
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .observe import STALLED_SECONDS, PartitionState, Snapshot

__all__ = ["COLOURS", "LiveView", "PlainView", "View", "show"]

COLOURS = {"A": "green", "B": "yellow", "C": "cyan", "D": "magenta"}
PLAIN_SECONDS = 2.0
EVENTS_SHOWN = 9
LINES_WITHOUT_EVENTS = 21


class View(Protocol):
    """What the scenario tells it. Instances are named by a letter; their states are words."""

    def begin(self, title: str) -> None: ...

    def narrate(self, text: str) -> None: ...

    def event(self, text: str) -> None: ...

    def update(self, snapshot: Snapshot, instances: dict[str, str]) -> None: ...


@contextmanager
def show(console: Console, *, plain: bool) -> Generator[View]:
    """The view that fits `console`."""
    if plain or not console.is_terminal:
        yield PlainView(console)
        return
    view = LiveView(max(3, min(EVENTS_SHOWN, console.height - LINES_WITHOUT_EVENTS)))
    with Live(get_renderable=view.render, console=console, refresh_per_second=4):
        yield view


class PlainView:
    """One line now and then, and one per event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = self._printed = time.monotonic()

    def begin(self, title: str) -> None:
        self._began = time.monotonic()
        self._print(f"\n== {title}")

    def narrate(self, text: str) -> None:
        self._print(f"-- {text}")

    def event(self, text: str) -> None:
        self._print(f"{self._elapsed()}  {text}")

    def update(self, snapshot: Snapshot, instances: dict[str, str]) -> None:
        if time.monotonic() - self._printed < PLAIN_SECONDS:
            return
        self._printed = time.monotonic()
        figures = "  ".join(f"{name} {value}" for name, value in _figures(snapshot))
        holders: dict[str, list[str]] = {}
        for number, state in enumerate(snapshot.partitions):
            holders.setdefault(state.owner or "nobody", []).append(str(number))
        held = "  ".join(f"{owner}:{','.join(numbers)}" for owner, numbers in sorted(holders.items()))
        self._print(f"{self._elapsed()}  {figures}  |  {held}")

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._began:5.1f} s"

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


class LiveView:
    """A picture that is redrawn in place."""

    def __init__(self, events: int) -> None:
        self._title = "preparing a database and a topic"
        self._text = ""
        self._began = time.monotonic()
        self._events: deque[str] = deque(maxlen=events)
        self._snapshot: Snapshot | None = None
        self._instances: dict[str, str] = {}

    def begin(self, title: str) -> None:
        self._title, self._began, self._snapshot = title, time.monotonic(), None
        self._events.clear()

    def narrate(self, text: str) -> None:
        self._text = text

    def event(self, text: str) -> None:
        self._events.append(f"{time.monotonic() - self._began:5.1f} s  {text}")

    def update(self, snapshot: Snapshot, instances: dict[str, str]) -> None:
        self._snapshot, self._instances = snapshot, dict(instances)

    def render(self) -> RenderableType:
        """The whole picture."""
        parts: list[RenderableType] = [Text(self._text, style="bold")]
        if self._snapshot is not None:
            pictures = Table.grid(padding=(0, 4))
            pictures.add_row(_figure_table(self._snapshot), _partition_table(self._snapshot, self._instances))
            parts.append(pictures)
        parts.append(Text("\n".join(self._events), style="dim"))
        elapsed = f"{time.monotonic() - self._began:.0f} s"
        return Panel(Group(*parts), title=self._title, subtitle=elapsed, padding=(1, 2))


def _figures(snapshot: Snapshot) -> list[tuple[str, str]]:
    p99 = snapshot.healthy_p99_seconds
    return [
        ("messages/s", f"{snapshot.messages_rate:.0f}"),
        ("jobs/s", f"{snapshot.jobs_rate:.0f}"),
        ("lag", str(snapshot.lag)),
        ("jobs running", str(snapshot.running)),
        ("waiting", str(snapshot.waiting)),
        ("blocked groups", str(snapshot.blocked_groups)),
        ("retries", str(snapshot.outcomes.get("retried", 0))),
        ("losses", str(snapshot.outcomes.get("lost", 0))),
        ("healthy p99", "-" if p99 is None else f"{p99 * 1000:.0f} ms"),
    ]


def _figure_table(snapshot: Snapshot) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(style="dim")
    table.add_column(justify="right", min_width=8)
    for name, value in _figures(snapshot):
        table.add_row(name, value)
    return table


def _partition_table(snapshot: Snapshot, instances: dict[str, str]) -> Table:
    table = Table(box=None, padding=(0, 1))
    table.add_column("partition", justify="right", style="dim")
    for name, state in instances.items():
        colour = COLOURS.get(name, "white") if state == "running" else "red"
        table.add_column(Text(f"{name}\n{state}", style=colour, justify="center"), justify="center", min_width=8)
    table.add_column("epoch", justify="right")
    table.add_column("lag", justify="right")
    table.add_column("", min_width=16)
    for number, state in enumerate(snapshot.partitions):
        owners = [_mark(name, instances[name], state) for name in instances]
        table.add_row(str(number), *owners, str(state.epoch), str(state.lag), _stillness(state, snapshot.at))
    return table


def _mark(name: str, instance_state: str, state: PartitionState) -> Text:
    if state.owner != name:
        return Text("·", style="dim")
    if instance_state == "running" and not state.expired:
        return Text("●", style=COLOURS.get(name, "white"))
    return Text("○", style="red")


def _stillness(state: PartitionState, at: float) -> Text:
    still = 0.0 if state.still_since is None else at - state.still_since
    return Text(f"still for {still:.0f} s", style="bold red") if still > STALLED_SECONDS else Text("")
