"""A small explicit-state model checker: breadth-first search, a liveness check, and random walks.

A model (`Model`) says how a state looks and what can happen in it. States are nested tuples: hashable, compared by
value. The search visits each state once, nearest first, so a counterexample is one of the shortest there are.

Safety: `broken` names the property that a state violates. Liveness: from every state that `quiet` selects, some
continuation must reach a state that satisfies `finished` (in temporal logic: AG EF finished). It is decided on the
whole graph, backwards from the finished states, so it needs a search that was not cut short.
"""

import random
import time
from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

__all__ = ["BOUNDED", "HOLDS", "VIOLATED", "Model", "Result", "explore", "walk"]

HOLDS = "holds"  # all reachable states were visited, nothing is wrong with any of them
VIOLATED = "violated"
BOUNDED = "bounded"  # the limit was reached first; nothing was wrong so far

S = TypeVar("S", bound=Hashable)


class Model(Protocol[S]):
    """What the checker needs to know of a model."""

    def initial(self) -> S:
        """The state that everything starts from."""
        ...

    def successors(self, state: S) -> Iterable[tuple[str, S]]:
        """Everything that can happen next: a label for the reader, and the state after it."""
        ...

    def broken(self, state: S) -> str:
        """The property that this state violates, or an empty string."""
        ...

    def quiet(self, state: S) -> bool:
        """Whether a finished state must be reachable from here."""
        ...

    def finished(self, state: S) -> bool:
        """Whether all that was to be done is done."""
        ...


@dataclass(frozen=True)
class Result:
    """The outcome of a search. `trace` holds the labels from the initial state to the violation."""

    verdict: str
    reason: str
    trace: tuple[str, ...]
    states: int
    seconds: float


class _Graph(Generic[S]):
    """The states seen so far in the order of their discovery, how each was first reached, and what leads to it."""

    def __init__(self, first: S) -> None:
        self.states = [first]
        self.number = {first: 0}
        self.parent = array("l", [-1])
        self.label = [""]
        self.before: list[list[int]] = [[]]

    def add(self, state: S, parent: int, label: str) -> bool:
        """Note a step; True if its end had not been seen before."""
        known = self.number.get(state)
        if known is not None:
            if known != parent:
                self.before[known].append(parent)
            return False
        self.number[state] = len(self.states)
        self.states.append(state)
        self.parent.append(parent)
        self.label.append(label)
        self.before.append([parent])
        return True

    def trace(self, number: int) -> tuple[str, ...]:
        """The labels on the shortest way to a state."""
        labels: list[str] = []
        while number > 0:
            labels.append(self.label[number])
            number = self.parent[number]
        return tuple(reversed(labels))

    def first_doomed(self, model: Model[S]) -> int | None:
        """The nearest quiet state from which no finished state can be reached."""
        saved = bytearray(len(self.states))
        todo = [n for n, state in enumerate(self.states) if model.finished(state)]
        for n in todo:
            saved[n] = 1
        while todo:
            for n in self.before[todo.pop()]:
                if not saved[n]:
                    saved[n] = 1
                    todo.append(n)
        return next((n for n, state in enumerate(self.states) if not saved[n] and model.quiet(state)), None)


def explore(model: Model[S], limit: int) -> Result:
    """Visit the states of a model, nearest first, at most `limit` of them, and stop at the first violation."""
    began = time.perf_counter()
    graph = _Graph(model.initial())

    def result(verdict: str, reason: str = "", at: int = 0) -> Result:
        return Result(verdict, reason, graph.trace(at), len(graph.states), time.perf_counter() - began)

    number = 0
    while number < len(graph.states):
        for label, state in model.successors(graph.states[number]):
            if graph.add(state, number, label):
                reason = model.broken(state)
                if reason:
                    return result(VIOLATED, reason, len(graph.states) - 1)
        if len(graph.states) > limit:
            return result(BOUNDED)
        number += 1
    doomed = graph.first_doomed(model)
    if doomed is not None:
        return result(VIOLATED, "LV: from here no continuation ends all committed jobs", doomed)
    return result(HOLDS)


def walk(model: Model[S], walks: int, steps: int, seed: int = 1) -> Result:
    """Wander at random through a space that is too large to be visited as a whole. Checks safety along each way, and
    at the end of each that stands in a quiet state, whether a finished one can still be reached."""
    began = time.perf_counter()
    chance = random.Random(seed)
    taken = 0
    for _ in range(walks):
        state = model.initial()
        trace: list[str] = []
        for _ in range(steps):
            choices = [(label, after) for label, after in model.successors(state) if after != state]
            if not choices or model.finished(state):
                break
            label, state = chance.choice(choices)
            trace.append(label)
            taken += 1
            reason = model.broken(state)
            if reason:
                return Result(VIOLATED, reason, tuple(trace), taken, time.perf_counter() - began)
        if model.quiet(state) and not _can_finish(model, state, chance):
            reason = "LV: from here no continuation ends all committed jobs"
            return Result(VIOLATED, reason, tuple(trace), taken, time.perf_counter() - began)
    return Result(HOLDS, "", (), taken, time.perf_counter() - began)


def _can_finish(model: Model[S], start: S, chance: random.Random) -> bool:
    """Whether a finished state can be reached: depth first, in random order, each state once."""
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        if model.finished(state):
            return True
        after = [s for _, s in model.successors(state) if s not in seen]
        chance.shuffle(after)
        seen.update(after)
        todo.extend(after)
    return False
