"""Model 4: consumers whose offsets are in Postgres, with `dedup`, parked messages, and resets.

Two instances, each of which believes that it has all partitions, as over a rebalance beside one that hangs. Each takes
what comes next in some of them, in one transaction: it records ids, asks what is parked, calls handlers, moves the
stored offsets, commits. Postgres may end a transaction at any time, and the answer to a commit may be lost. A record
may vanish from the log before it is delivered. Properties:

I5  a message below the stored offset has had its effects once, or waits as a job, or repeats one of which that is true,
    or will be; nothing has effects twice. After a reset that holds from the new offset on
I4  effects of one key and partition come in the order of the log
I8  what a transaction did that began before a reset is not committed after it
LV  from every state all messages can still be handled

Here the steps of the instances, of executors and of a person, and the properties; the state is in `consumer_state`.
"""

from collections.abc import Iterator
from itertools import product

from consumer_state import (
    ADVANCED,
    ASKS,
    CALLS,
    LOOKS,
    SECOND,
    Member,
    Offset,
    Protocol,
    Scenario,
    State,
    Tx,
    swap,
)

__all__ = ["Consumer"]

Steps = Iterator[tuple[str, State]]


class Consumer:
    """The model: a protocol, right or wrong, in a scenario."""

    def __init__(self, protocol: Protocol, scenario: Scenario) -> None:
        self.protocol = protocol
        self.scenario = scenario
        self.log = scenario.log
        self._partitions = range(len(scenario.ends))
        self._ids = {message.id for message in self.log if message.id}

    # -- for the checker -----------------------------------------------------------------------------------------

    def initial(self) -> State:
        none = tuple(None for _ in self.scenario.ends)
        offsets = tuple(Offset(0, 0) for _ in self.scenario.ends)
        member = Member(none, None)
        return State(offsets, (), (), (0,) * len(self.log), (member, member), self.scenario.budget)

    def successors(self, state: State) -> Steps:
        if state.broken:
            return
        for i, member in enumerate(state.members):
            yield from self._places(state, i)
            if member.tx is None:
                yield from self._begins(state, i)
            else:
                yield from self._goes_on(state, i, member.tx)
        yield from self._runs_jobs(state)
        yield from self._resets(state)
        yield from self._vanishes(state)

    def broken(self, state: State) -> str:
        return state.broken

    def quiet(self, state: State) -> bool:
        return True

    def finished(self, state: State) -> bool:
        return not state.jobs and not any(self._ahead(state, p, offset) for p, offset in enumerate(state.offsets))

    # -- an instance: what is to be handled ----------------------------------------------------------------------

    def _name(self, number: int) -> str:
        return f"{'pq'[self.log[number].partition]}{self.log[number].offset}"

    def _with(self, s: State, i: int, member: Member) -> State:
        return s._replace(members=swap(s.members, i, member))

    def _places(self, s: State, i: int) -> Steps:
        """Reading goes on at the stored offset; also where a look at the resets has told that it is another one."""
        member = s.members[i]
        for p, place in enumerate(member.places) if member.tx is None else ():
            stored = s.offsets[p]
            if place is None or (place.resets != stored.resets and self.protocol.reset == "is looked for"):
                placed = member._replace(places=swap(member.places, p, stored))
                yield f"{'AB'[i]} reads the stored offset of {'pq'[p]}", self._with(s, i, placed)

    def _begins(self, s: State, i: int) -> Steps:
        """A transaction for the next messages of some partitions, those of either first; or one that parks."""
        member = s.members[i]
        ahead = [self._ahead(s, p, place) for p, place in enumerate(member.places)]
        resets = tuple(offset.resets for offset in s.offsets)
        counts = [range(len(numbers) + 1) for numbers in ahead]
        for taken in product(*counts):
            parts = [numbers[:count] for numbers, count in zip(ahead, taken, strict=True) if count]
            for order in (parts, parts[::-1]) if len(parts) > 1 else (parts,):
                items = tuple(number for part in order for number in part)
                if items:
                    tx = Tx(LOOKS, items, member.places, resets)
                    yield f"{'AB'[i]} begins with {self._names(items)}", self._step(s, i, tx)
        for numbers in ahead if s.budget.parks else ():
            if numbers:
                spent = s._replace(budget=s.budget._replace(parks=s.budget.parks - 1))
                begun = self._step(spent, i, Tx(LOOKS, numbers[:1], member.places, resets, parks=True))
                if self.protocol.parking == "a transaction of its own":
                    begun = begun._replace(jobs=(*begun.jobs, numbers[0]))
                yield f"{'AB'[i]} is to park {self._name(numbers[0])}", begun

    def _ahead(self, s: State, p: int, place: Offset | None) -> tuple[int, ...]:
        """What will be delivered."""
        if place is None:
            return ()
        there = (n for n, message in enumerate(self.log) if message.partition == p and message.offset >= place.next)
        return tuple(n for n in there if n not in s.gone)

    def _names(self, numbers: tuple[int, ...]) -> str:
        return ", ".join(map(self._name, numbers)) or "nothing"

    # -- an instance: its transaction ----------------------------------------------------------------------------

    def _goes_on(self, s: State, i: int, tx: Tx) -> Steps:
        who = "AB"[i]
        yield f"{who}'s transaction is rolled back", self._displaced(s, i, tx)
        if tx.phase == LOOKS:
            yield from self._looks(s, i, tx)
        elif tx.phase == SECOND:
            yield f"{who} looks at its repeats again", self._step(s, i, self._second(s, tx))
        elif tx.phase == ASKS:
            parked = {(self.log[job].partition, self.log[job].key) for job in s.jobs}
            asked = self.protocol.parked == "asked for"
            aside = tuple(n for n in tx.items if asked and (self.log[n].partition, self.log[n].key) in parked)
            yield f"{who} asks what is parked", self._step(s, i, tx._replace(phase=CALLS, aside=aside))
        elif tx.phase == CALLS:
            for count in range(1, len(tx.items) + 1):
                yield from self._advances(s, i, self._ends(tx, count))
        else:
            yield from self._commits(s, i, tx)

    def _step(self, s: State, i: int, tx: Tx) -> State:
        return self._with(s, i, s.members[i]._replace(tx=tx))

    def _displaced(self, s: State, i: int, tx: Tx) -> State:
        """Nobody knows what has become of it: its partitions are to be placed anew."""
        of = {self.log[n].partition for n in tx.items}
        places = tuple(None if p in of else place for p, place in enumerate(s.members[i].places))
        return self._with(s, i, Member(places, None))

    def _looks(self, s: State, i: int, tx: Tx) -> Steps:
        """`record_seen.sql`. An id that another transaction has recorded is waited for."""
        if not any(self.log[n].id for n in tx.items):
            yield f"{'AB'[i]} has no ids to record", self._step(s, i, self._asks(tx._replace(phase=ASKS)))
            return
        theirs = {self.log[n].id for k, other in enumerate(s.members) if k != i and other.tx for n in other.tx.recorded}
        if tx.snapshot is None:
            tx = tx._replace(snapshot=s.seen)
            yield f"{'AB'[i]} looks for its ids", self._step(s, i, tx)
            return
        known = {self.log[n].id: n for n in tx.snapshot}
        now = {self.log[n].id: n for n in s.seen}
        recorded, repeats = [], []
        waits = False
        for n in tx.items:
            id = self.log[n].id
            if not id:
                continue
            if id in known:
                own = known[id] == n and self.protocol.places == "beside the ids"
                repeats += [] if own else [n]
            elif any(self.log[r].id == id for r in recorded) or id in now:
                repeats.append(n)
            elif id in theirs:
                waits = True
                repeats.append(n)
            elif not (tx.parks and self.protocol.parking == "without its id"):
                recorded.append(n)
        if waits and self.protocol.taken == "waited for":
            return
        second = bool(repeats) and self.protocol.second_look
        phase = SECOND if second else ASKS
        tx = tx._replace(recorded=tuple(recorded), repeats=tuple(repeats), phase=phase, snapshot=None)
        yield f"{'AB'[i]} records ids; repeats: {self._names(tx.repeats)}", self._step(s, i, self._asks(tx))

    def _ends(self, tx: Tx, count: int) -> Tx:
        """It comes to no more than `count` of its messages: `take_back_seen.sql`."""
        rest = tx.items[count:]
        if self.protocol.rest == "are taken back":
            rest = tuple(n for n in rest if n in tx.recorded)
        return tx._replace(items=tx.items[:count], rest=() if self.protocol.rest == "stay recorded" else rest)

    def _second(self, s: State, tx: Tx) -> Tx:
        own = self.protocol.places == "beside the ids"
        repeats = tuple(n for n in tx.repeats if not (own and n in s.seen))
        return self._asks(tx._replace(phase=ASKS, repeats=repeats))

    def _asks(self, tx: Tx) -> Tx:
        """To ask what is parked is no step of its own where nothing ever is."""
        return tx._replace(phase=CALLS) if tx.phase == ASKS and not self.scenario.budget.parks else tx

    def _advances(self, s: State, i: int, tx: Tx) -> Steps:
        """`advance_offsets.sql`: the compare-and-set, whose locks stand until the end."""
        of = sorted({self.log[n].partition for n in tx.items})
        if any(p in other.tx.locks for k, other in enumerate(s.members) if k != i and other.tx for p in of):
            return  # waits for that row
        who, moves = "AB"[i], []
        for p in of:
            stored, place = s.offsets[p], tx.places[p]
            assert place is not None
            expected = place.next
            if self.protocol.expects == "the message's offset":
                expected = min(self.log[n].offset for n in tx.items if self.log[n].partition == p)
            same = stored.next == expected or self.protocol.expects == "nothing"
            if not same or (stored.resets != place.resets and self.protocol.resets == "are expected, too"):
                yield f"{who}: the offset of {'pq'[p]} has moved", self._displaced(s, i, tx)
                return
            moves.append(self._after(s, p, place, tx))
        done = f"{who} has done {self._names(tx.items)}, moves the offsets"
        yield done, self._step(s, i, tx._replace(phase=ADVANCED, locks=tuple(of), moves=tuple(moves)))

    def _after(self, s: State, p: int, place: Offset, tx: Tx) -> int:
        """The offset to store."""
        last = max(n for n in tx.items if self.log[n].partition == p)
        whole = all(n <= last for n in self._ahead(s, p, place))
        return self.scenario.ends[p] if whole else self.log[last].offset + 1

    def _commits(self, s: State, i: int, tx: Tx) -> Steps:
        member, who, after = s.members[i], "AB"[i], self._committed(s, i, tx)
        places = member.places
        for p, to in zip(tx.locks, tx.moves, strict=True):
            place = places[p]
            assert place is not None
            places = swap(places, p, place._replace(next=to))
        yield f"{who} commits", self._with(after, i, Member(places, None))
        if s.budget.losses:
            spent = after._replace(budget=s.budget._replace(losses=s.budget.losses - 1))
            lost = self._displaced(spent, i, tx)
            yield f"{who} commits, the answer is lost", lost

    def _committed(self, s: State, i: int, tx: Tx) -> State:
        offsets, effects, jobs = s.offsets, s.effects, s.jobs
        for p, to in zip(tx.locks, tx.moves, strict=True):
            offsets = swap(offsets, p, offsets[p]._replace(next=to))
        s = s._replace(offsets=offsets, seen=tuple(sorted({*s.seen, *tx.recorded} - {*tx.rest})))
        if any(s.offsets[p].resets != tx.resets[p] for p in tx.locks):
            s = s._replace(broken="I8: a transaction that began before a reset commits after it")
        for n in tx.items:
            if n in tx.repeats:
                continue
            if tx.parks or n in tx.aside:
                jobs = (*jobs, n) if not (tx.parks and self.protocol.parking == "a transaction of its own") else jobs
            else:
                s = self._in_order(s._replace(jobs=jobs, effects=effects), n)
                effects = swap(effects, n, effects[n] + 1)
        return self._checked(s._replace(jobs=jobs, effects=effects))

    # -- others --------------------------------------------------------------------------------------------------

    def _runs_jobs(self, s: State) -> Steps:
        """An executor runs the first job of a key: transactional, so that its end is one step."""
        keys: set[tuple[int, str]] = set()
        for place, n in enumerate(s.jobs):
            key = (self.log[n].partition, self.log[n].key)
            if key not in keys:
                keys.add(key)
                done = self._in_order(s, n)
                done = done._replace(
                    jobs=s.jobs[:place] + s.jobs[place + 1 :], effects=swap(s.effects, n, s.effects[n] + 1)
                )
                yield f"the job of {self._name(n)} ends", self._checked(done)

    def _resets(self, s: State) -> Steps:
        """A person moves an offset back to the first message, and cancels the jobs of what will be delivered again."""
        for p in self._partitions:
            of = tuple(n for n, message in enumerate(self.log) if message.partition == p)
            if self.protocol.cancels == "what it has seen before" and s.budget.resets and s.looked is None:
                yield f"a person looks for jobs of {'pq'[p]}", s._replace(looked=tuple(n for n in s.jobs if n in of))
                continue
            locked = any(m.tx and p in m.tx.locks for m in s.members)
            if not s.budget.resets or locked or s.offsets[p].next == 0:
                continue
            gone = of if s.looked is None else s.looked
            again = tuple(0 if n in of else effects for n, effects in enumerate(s.effects))
            left = tuple(n for n in s.jobs if n not in gone)
            yield (
                f"a person resets {'pq'[p]}",
                s._replace(
                    offsets=swap(s.offsets, p, Offset(0, s.offsets[p].resets + 1)),
                    jobs=left,
                    effects=again,
                    budget=s.budget._replace(resets=s.budget.resets - 1),
                    looked=None,
                ),
            )

    def _vanishes(self, s: State) -> Steps:
        """A record is gone before it is delivered, and will never be: its topic is made anew, and what is sent again
        stands elsewhere; the log is cut off; or it is compacted, and has a later one of the key."""
        for n, message in enumerate(self.log) if s.budget.vanishes else ():
            if message.id and n not in s.gone and message.offset >= s.offsets[message.partition].next:
                budget = s.budget._replace(vanishes=s.budget.vanishes - 1)
                yield f"{self._name(n)} vanishes", self._checked(s._replace(gone=(*s.gone, n), budget=budget))

    # -- properties ----------------------------------------------------------------------------------------------

    def _in_order(self, s: State, n: int) -> State:
        its = self.log[n]
        for k, other in enumerate(self.log[:n]):
            same = (other.partition, other.key) == (its.partition, its.key)
            owed = not s.effects[k] and k not in s.gone
            if same and owed and not self._repeats(s, k) and not s.broken:
                s = s._replace(broken=f"I4: {self._name(n)} has its effects before {self._name(k)}")
        return s

    def _repeats(self, s: State, n: int) -> bool:
        """Whether another message counts for it, which was handled, is parked, or will be delivered."""
        for k in s.seen:
            if k != n and self.log[k].id == self.log[n].id and self.log[n].id:
                ahead = self.log[k].offset >= s.offsets[self.log[k].partition].next
                return bool(s.effects[k]) or k in s.jobs or (ahead and k not in s.gone)
        return False

    def _checked(self, s: State) -> State:
        if s.broken:
            return s
        for n, message in enumerate(self.log):
            times = s.effects[n] + s.jobs.count(n)
            if times > 1:
                return s._replace(broken=f"I5: {self._name(n)} is handled twice")
            passed = message.offset < s.offsets[message.partition].next and n not in s.gone
            if passed and not times and not self._repeats(s, n):
                return s._replace(broken=f"I5: {self._name(n)} is passed over, and was never handled")
        for id in self._ids:
            numbers = [n for n, message in enumerate(self.log) if message.id == id]
            if sum(s.effects[n] + s.jobs.count(n) for n in numbers) > 1:
                return s._replace(broken=f"I5: two messages with the id {id} are handled")
        return s
