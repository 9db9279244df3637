"""Which job runs next: a pure object, without I/O and without a clock of its own (`now` is passed in, in seconds).

It holds the waiting jobs of all origins that this executor has leased. Jobs of one group form a `Lane`, a virtual
partition: one job at a time, by position. What must never happen is kept here: two jobs of a lane at once, a job
twice, a job before its predecessor.

Rules, each found by the model in `docs/model/reads.py` or by a stress run:

- A head is removed from its lane when it is chosen, not after an await.
- A lane keeps at most `keep` fetched jobs. What does not fit is dropped and the lane is flagged `more`: the rest is in
  the database, behind `last`, and comes back as a refill. Rows above `last` of such a lane are ignored.
- A lane whose head failed is compacted: all its fetched jobs are dropped, and it is read again from its head when
  that is due. So a stuck lane costs a few hundred bytes, and the database is the only truth about its jobs.
- The successor of a job becomes ready only when the job's outcome is committed (`ended`, `again`), or it is named by
  the very cycle that records the job's success (`hand_over`): one commit for both. Where that cycle comes to nothing,
  or goes without this outcome, the successor is put back and the lane is again the job's.
- A job that ended while a read was under way may still be in that read's result, as the attempt that it was.
- A failed job may be promoted and read again before its outcome is known here to be committed. That row is put by.
- A job of policy `latest` starts when the database has said that it is the newest of its kind in its lane (`crowded`).
- A job of policy `parallel` is in no lane, whatever its group.
- What is paused is not kept in memory: a resumption reads everything anew.
- A lane whose head waits for a person (it is blocked, its type is paused) goes on with a late job before that head.
- What is ready, and how many lanes may come back from their backoff at once, `ready` keeps.
- Of what a person has changed the lane is read again from its first job; what was ended in no lane is taken out.
"""

import logging
import shlex
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, islice
from math import inf

from ..jobs import Policy
from .memory import Memory
from .queues import NOTHING_PAUSED, Entry, Lane, OriginQueue, Pauses
from .ready import ReadyQueue
from .suspects import Suspects

__all__ = ["Scheduler"]

log = logging.getLogger("sidings.executor")

_LATEST, _PARALLEL = Policy.LATEST.value, Policy.PARALLEL.value

_UNKNOWN_SECONDS = 60.0  # a group behind a job of an unknown type is looked at again: somebody may have removed the job
_HEAVY = 256  # rows dropped from one lane before the server is asked to leave the lane out


class Scheduler:
    """The waiting jobs of all leased origins.

    known_type: whether this process has a handler for a type; jobs of others wait, until `learn` finds them declared.
    window: how many runnable lanes and single jobs to have in memory. keep: most jobs of one lane in memory.
    budget: how many jobs in memory suffice while there are enough runnable ones. payload_budget: the same in characters
    of their payloads and headers.
    """

    def __init__(
        self,
        known_type: Callable[[str], bool],
        *,
        window: int = 4_000,
        keep: int = 64,
        budget: int = 8_000,
        payload_budget: int = 64_000_000,
    ) -> None:
        self.origins: dict[str, OriginQueue] = {}
        self.timeline: str | None = None  # of the server that everything here was read from
        self.suspects = Suspects()
        self.reading = False
        self.hungry: dict[Lane, None] = {}  # lanes to refill
        self.heavy: dict[Lane, None] = {}  # lanes so deep that the server should leave them out of forward reads
        self.crowded: dict[Lane, str] = {}  # lanes whose head may have been superseded, by a newer job of this type
        self.pauses = NOTHING_PAUSED
        self._ready = ReadyQueue(window, payload_budget)
        self.memory = Memory(
            self.origins, self._ready, window=window, keep=keep, budget=budget, payload_budget=payload_budget
        )
        self._known_type = known_type
        self._types: set[str] = set()  # those that it has said yes to
        self._unknown: set[str] = set()  # those that it has said no to: what was read of them was left, until `learn`
        self._ended: dict[int, int] = {}  # id -> attempt, of jobs that ended while a read was under way
        self._early: dict[int, Entry] = {}  # next attempts, read before the last one's outcome was acknowledged
        self._shares: dict[str, int] = {}  # how many more may be chosen, of types that are slow or have a limit
        self._slow: Collection[str] = ()

    # -- origins ------------------------------------------------------------------------------------------------

    def add_origin(self, name: str, epoch: int) -> OriginQueue:
        """Start with an origin that has just been acquired; its jobs are read from position 0."""
        self.remove_origin(name)
        queue = self.origins[name] = OriginQueue(name, epoch, self.timeline)
        return queue

    def read_from(self, timeline: str) -> None:
        """What follows has been acquired and read on this timeline; of another one nothing is left here."""
        if timeline != self.timeline:
            self.timeline = timeline
            for queue in self.origins.values():
                queue.timeline = timeline

    def remove_origin(self, *names: str) -> None:
        """Forget origins and everything of them; many together, since all that waits is looked through."""
        queues = [queue for name in names if (queue := self.origins.pop(name, None)) is not None]
        if not queues:
            return
        self.forget_waiting(*queues)
        for queue in queues:
            for entry in queue.running:
                self.memory.drop(entry)
            self.suspects.over(queue.running)
            queue.running.clear()
            queue.lanes.clear()

    def drain(self, *queues: OriginQueue) -> None:
        """Choose nothing more of these origins. What runs goes on."""
        for queue in queues:
            queue.draining = True
        self.forget_waiting(*queues)

    def resume(self, queue: OriginQueue) -> None:
        """Take a draining origin back, under the epoch that it still has."""
        queue.draining = False

    def forget_waiting(self, *queues: OriginQueue) -> None:
        """Drop the waiting jobs of these origins, to be read from position 0 again; what runs stays known."""
        gone = set(queues)
        self._ready.forget(lambda item: item.origin in gone)
        self.suspects.forget(lambda entry: entry.origin in gone)
        for entry in [e for e in self.memory.jobs.values() if e.origin in gone and e not in e.origin.running]:
            self.memory.drop(entry)
        self._early = {id: entry for id, entry in self._early.items() if entry.origin not in gone}
        for queue in queues:
            queue.version += 1
            queue.high = queue.first = 0
            queue.backlogged = True
            queue.unknown.clear()
            for lane in list(queue.lanes.values()):
                self._forget_lane(lane)
                if lane.running is None:
                    del lane.origin.lanes[lane.group]

    def forget(self, groups: Collection[tuple[str, str]], ended: Collection[int]) -> None:
        """Drop what waits of these groups (origin, group), to be read again from their first jobs, and these jobs,
        which are no more; what runs stays known, as all else does. The read that is under way must not be delivered if
        it may be older than what they are forgotten for."""
        read = {queue.name: queue for queue in self.origins.values() if not queue.draining}
        lanes = {lane for name, group in groups if name in read and (lane := read[name].lanes.get(group)) is not None}
        known = [entry for id in ended if (entry := self.memory.jobs.get(id)) is not None and entry.lane is None]
        single = {entry for entry in known if entry not in entry.origin.running}
        if single or any(lane.queued for lane in lanes):
            self._ready.remove({*lanes, *single})
        for entry in (*single, *self.suspects.forget(lambda entry: entry in single or entry.lane in lanes)):
            self.memory.drop(entry)
        for lane in lanes:
            for entry in lane.queue:
                self.memory.drop(entry)
            self._forget_lane(lane)
            lane.more = True
            self.hungry[lane] = None
        for id in (*ended, *(lane.running.id for lane in lanes if lane.running is not None)):
            self._early.pop(id, None)

    def has_parallel(self, groups: Collection[tuple[str, str]]) -> bool:
        """Whether a job of policy `parallel` waits that belongs to one of these groups (origin, group), in no lane."""
        if not groups:
            return False
        waiting = [e for e in self.memory.jobs.values() if e.lane is None and e not in e.origin.running]
        return any((e.origin.name, e.group) in groups for e in (*waiting, *self._early.values()))

    def has_delayed(self, ids: Collection[int], now: float) -> bool:
        """Whether one of these jobs waits for its time, in no lane: the clock has been set back since it was due."""
        known = [entry for id in ids if (entry := self.memory.jobs.get(id)) is not None]
        return any(entry.lane is None and entry.due is not None and entry.due > now for entry in known)

    def _forget_lane(self, lane: Lane) -> None:
        lane.queue.clear()
        lane.queued = lane.more = False
        lane.due = lane.blocked_by = None
        lane.last = lane.skipped = 0
        lane.version += 1
        self.hungry.pop(lane, None)
        self.heavy.pop(lane, None)
        self.crowded.pop(lane, None)
        self._ready.leave(lane)

    # -- what came from the database ----------------------------------------------------------------------------

    def insert(self, entry: Entry, now: float) -> None:
        """Take in a row that a read has delivered. Rows that are known, over, or left to a refill are ignored."""
        self.insert_all([entry], now)

    def insert_all(self, entries: Iterable[Entry], now: float) -> None:
        """`insert`, for many: what is done for each job of no group is done without a call."""
        jobs, ready, ended, size, count = self.memory.jobs, self._ready, self._ended, 0, 0
        paused = self.pauses is not NOTHING_PAUSED
        type: str | None = None  # of the one before, and where its first attempts of priority 0 stand
        line: deque[Entry | Lane] = deque()
        for entry in entries:
            id = entry.id
            if id in jobs and not self._displaces(entry, jobs[id], now):
                continue
            if id in ended and entry.attempt <= ended[id]:
                continue
            if entry.group is not None and entry.policy != _PARALLEL:
                self._insert_grouped(entry, now)
                continue
            if entry.type != type:
                if not self.knows_type(entry.type):
                    self._meet_unknown(entry)
                    continue
                type, line = entry.type, ready.line(0, entry.type)
            if paused and self.withholds(entry.type, entry.origin.name, entry.group):
                continue
            jobs[id] = entry
            if entry.payload is not None:
                size += len(entry.payload)
            if entry.headers is not None:
                size += len(entry.headers)
            if entry.due is not None and entry.due > now:
                ready.delay(entry, entry.due)
            elif entry.attempt != 1 or entry.priority:
                ready.push(entry, entry)
            else:
                line.append(entry)
                count += 1
        self.memory.payload += size
        ready.count += count

    def _displaces(self, entry: Entry, known: Entry, now: float) -> bool:
        """Whether a job that is known is to be taken in once more: it has been given a new place."""
        if known in known.origin.running:
            if entry.attempt > known.attempt:
                self._early[entry.id] = entry
            return False
        if known.position == entry.position:
            return False
        self._discard_waiting(known)
        if known.lane is not None:
            self._go_on(known.lane, now)
        return True

    def _insert_grouped(self, entry: Entry, now: float) -> None:
        lanes = entry.origin.lanes
        assert entry.group is not None
        lane = lanes.get(entry.group)
        if lane is None:
            lane = lanes[entry.group] = Lane(entry.origin, entry.group)
        if lane.more and entry.position > lane.last:
            lane.skipped += 1
            if lane.skipped == _HEAVY:
                self.heavy[lane] = None
            return
        entry.lane, memory = lane, self.memory
        memory.jobs[entry.id] = entry
        if entry.payload is not None:
            memory.payload += len(entry.payload)
        if entry.headers is not None:
            memory.payload += len(entry.headers)
        queue, former = lane.queue, None
        if not queue or entry.position > queue[-1].position:
            queue.append(entry)
        else:  # a late commit: it takes its place by position
            former, behind = queue[0], list[Entry]()
            while queue and queue[-1].position > entry.position:
                behind.append(queue.pop())
            queue.append(entry)
            queue.extend(reversed(behind))
        if len(queue) > memory.keep or (lane.back and len(queue) > 1 and not self._ready.grow(lane, entry.size)):
            memory.drop(queue.pop())
            lane.more = True
            lane.last = queue[-1].position
            lane.version += 1  # a refill under way was to begin behind the job that was dropped just now
        if queue[0] is entry and (lane.due is not None or lane.queued):
            self._lead(lane, entry, former, now)
        if lane.running is None and not lane.queued:
            self._arm(lane, now)

    def _lead(self, lane: Lane, entry: Entry, former: Entry | None, now: float) -> None:
        """A late job has become the first of a lane that waits; former: which was so before, if it was known."""
        line = (entry.priority, entry.type)
        if lane.due is not None:  # for what is not this one's: a person decides, or there is no room for another type
            if lane.due == inf or (lane.due <= now and lane.line != line):
                lane.due = None
        elif former is None or line != (former.priority, former.type):
            self._ready.take_out(lane, former or entry)  # it has its turns in another line from now on
            lane.queued = False

    def take_hungry(self, most: int) -> list[tuple[Lane, int, int]]:
        """Up to so many lanes that a read is to refill: the lane, its version, and the position to read it up to."""
        taken = list(islice(self.hungry, most))
        for lane in taken:
            del self.hungry[lane]
        return [
            (lane, lane.version, lane.origin.high)
            for lane in taken
            if lane.more and not lane.origin.draining and self.origins.get(lane.origin.name) is lane.origin
        ]

    def still_hungry(self, lanes: Iterable[tuple[Lane, int, int]]) -> None:
        """The read that was to refill these has come to nothing."""
        self.hungry.update((lane, None) for lane, version, _ in lanes if lane.version == version)

    def refill_first(self, lanes: Iterable[Lane]) -> None:
        """These before all others that are hungry."""
        self.hungry = dict.fromkeys(lane for lane in lanes if lane in self.hungry) | self.hungry

    def refilled(self, lane: Lane, rows: Sequence[Entry], *, size: int, upto: int, left_out: bool, now: float) -> None:
        """Apply the refill of a lane: its rows behind `last`, at most `size`, up to the position `upto`.

        left_out: rows of the lane above `upto` were kept back by the server in the same read.
        """
        lane.more = False
        count, position = len(rows), max([lane.last, *(entry.position for entry in rows)])
        self.insert_all(rows, now)
        if not lane.more:
            if count < size:  # all up to `upto`: for what may stand above, the next read need not leave the lane out
                lane.skipped = 0
                self.heavy.pop(lane, None)
            lane.more = left_out or count >= size
            lane.last = upto if count < size else position
        self._go_on(lane, now)

    def read_delivered(self) -> None:
        """The read that was under way has been applied, or has failed."""
        self.reading = False
        self._ended.clear()
        if self.heavy:
            self.heavy = {lane: None for lane in self.heavy if lane.more}

    # -- choosing -----------------------------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """Lanes and single jobs that could be chosen now."""
        return self._ready.count

    def runnable(self) -> bool:
        """Whether `choose` may find something."""
        return self._ready.any(self._shares) or self.suspects.ready()

    def waits_for_room(self) -> bool:
        """Whether lanes wait for room here, as those of a type that is full: jobs that come now may be of that type,
        and would wait as well, in the database."""
        return self._ready.waits_for_room()

    def share_out(self, slow: dict[str, int], limited: Mapping[str, int]) -> None:
        """From now on choose of each of these types only so many more jobs; of others any. Each job of a slow type
        leaves one less to all slow ones; one of a type with a limit of its own, to that type."""
        self._slow = slow.keys()
        self._shares = slow | {type: min(left, slow.get(type, left)) for type, left in limited.items()}
        self._ready.slow = self._shares.keys()

    def choose(self, limit: int, now: float) -> list[Entry]:
        """Take up to `limit` jobs that may run now, the highest priority first, types in turns, and in turns with first
        attempts what runs again."""
        chosen: list[Entry] = []
        if limit > 0 and (entry := self._next_suspect(now)) is not None:
            entry.origin.running.add(entry)
            chosen.append(entry)
            self._count(entry.type)
        if len(chosen) >= limit:
            return chosen
        shares = self._shares
        for item in chain(self._ready.take_alike(limit - len(chosen)), self._ready.take(shares)):
            if shares and isinstance(item, Lane) and item.queue and shares.get(item.queue[0].type, 1) <= 0:
                self._ready.push(item, item.queue[0])  # a late one of another type has become its head
                continue
            entry = self._take(item, now) if isinstance(item, Lane) else item
            if entry is None or (entry.losses and not self.suspects.admit(entry, now)):
                continue
            entry.origin.running.add(entry)
            chosen.append(entry)
            if shares:
                self._count(entry.type)
            if len(chosen) == limit:
                break
        return chosen

    def _count(self, type: str) -> None:
        """A job of this type has been chosen."""
        if type in self._slow:
            for slow in self._slow:  # a worker less is left beside all of them
                self._shares[slow] -= 1
        elif type in self._shares:
            self._shares[type] -= 1

    def _next_suspect(self, now: float) -> Entry | None:
        """One that may start. While it waited, a read may have brought a job that stands before it in its lane."""
        full = [type for type, left in self._shares.items() if left <= 0]
        while self.suspects.ready() and (entry := self.suspects.start(now, full)) is not None:
            if entry.lane is None or not entry.lane.queue or entry.lane.queue[0].position > entry.position:
                return entry
            self.put_back(entry, now)
        return None

    def hand_over(self, ending: Iterable[Entry], limit: int, now: float) -> list[Entry]:
        """Take the next jobs, at most `limit`, of the lanes whose running jobs are `ending`: the same cycle records
        their successes, and the next ones start when that is committed. Only jobs that nothing speaks against; any
        other becomes ready in its own time."""
        successors: list[Entry] = []
        types, shares, paused = self._types, self._shares, self.pauses is not NOTHING_PAUSED
        for entry in ending:
            lane = entry.lane
            if lane is None or lane.running is not entry or not lane.queue:
                continue
            head = lane.queue[0]
            if head.policy or head.losses or head.type not in types or head.type in shares:
                continue
            if head.due is not None and head.due > now:
                continue
            if paused and self.withholds(head.type, lane.origin.name, lane.group):
                continue
            if len(successors) == limit:
                break
            del lane.queue[0]
            lane.running, lane.ending = head, entry
            head.origin.running.add(head)
            if lane.more:
                self._check_hunger(lane)
            successors.append(head)
        return successors

    def choose_more(self, wanted: dict[tuple[OriginQueue, str], int], limit: int, now: float) -> list[Entry]:
        """Take up to `limit` more jobs, and of each origin and type no more than `wanted`. None that has failed or may
        have killed an executor: such a one runs alone."""
        chosen: list[Entry] = []
        limit = min(limit, sum(wanted.values()))
        for line in self._ready.lines({type for _, type in wanted}):
            passed = 0
            for _ in range(len(line)):
                if len(chosen) == limit:
                    break
                item = line.popleft()
                head = item if isinstance(item, Entry) else item.queue[0] if item.queue else None
                left = 0 if head is None else wanted.get((head.origin, head.type), 0)
                if head is None or not left or head.failures or head.losses:
                    line.append(item)
                    passed += 1
                    continue
                self._ready.count -= 1
                entry = self._take(item, now) if isinstance(item, Lane) else item
                if entry is not None:
                    wanted[entry.origin, entry.type] = left - 1
                    entry.origin.running.add(entry)
                    chosen.append(entry)
            line.rotate(passed)  # these go first still
        return chosen

    def _take(self, lane: Lane, now: float) -> Entry | None:
        lane.queued = False
        self._ready.leave(lane)
        if not lane.queue:
            self._drop_if_empty(lane)
            return None
        head = lane.queue[0]
        if not self._may_run(lane, head, now):  # a late one, perhaps, that was not there when the lane was armed
            return None
        if head.policy == _LATEST and head.id != lane.newest and self._may_be_followed(lane, head):
            self.crowded[lane] = head.type
            return None
        del lane.queue[0]
        lane.running = head
        lane.newest = 0
        if lane.more:
            self._check_hunger(lane)
        return head

    def _may_be_followed(self, lane: Lane, head: Entry) -> bool:
        return lane.more or any(entry.type == head.type for entry in islice(lane.queue, 1, None))

    def thinned(self, lane: Lane, newest: int, superseded: int, now: float) -> None:
        """The database has left only the newest job of a crowded lane's type, and has ended so many others."""
        if self.crowded.pop(lane, None) is None:  # forgotten meanwhile
            return
        lane.newest = newest if superseded or not lane.queue else lane.queue[0].id
        if superseded and lane.queue:
            self._compact(lane, lane.queue[0].position)
        self._go_on(lane, now)

    def read_anew(self, lane: Lane, due: float) -> None:
        """Whether jobs of a crowded lane have been ended is not known: none of those in memory may run. It is read
        again at `due`."""
        if self.crowded.pop(lane, None) is not None:
            if lane.queue:
                self._stick(lane, lane.queue[0], due)
            self._drop_if_empty(lane)

    def put_back(self, entry: Entry, now: float) -> None:
        """Undo `choose` for a job that has not started. Where its origin drains or has not been read up to it again,
        or jobs before it have been left in the database meanwhile, it is forgotten, to be read again."""
        entry.origin.running.discard(entry)
        self.suspects.over([entry])
        origin, lane = entry.origin, entry.lane
        unread = origin.draining or entry.position > origin.high
        if lane is None:
            if unread or self.withholds(entry.type, origin.name, entry.group):
                self.memory.drop(entry)
            else:
                self._ready.push(entry, entry)
            return
        lane.running, lane.ending = lane.ending, None
        if unread or (lane.more and entry.position > lane.last):
            self.memory.drop(entry)
        else:
            lane.queue.insert(0, entry)
            lane.queue.sort(key=lambda e: e.position)
        self._go_on(lane, now)

    # -- outcomes, once they are committed ----------------------------------------------------------------------

    def ended(self, entry: Entry, now: float) -> None:
        """The job has left its order: it is over, or held."""
        self.all_ended([entry], now)

    def all_ended(self, entries: Sequence[Entry], now: float) -> None:
        """`ended`, for many: what is done for each job is done without a call."""
        known, origins, early, size = self.memory.jobs, self.origins, self._early, 0
        for entry in entries:
            origin, lane = entry.origin, entry.lane
            if known.get(entry.id) is entry:
                del known[entry.id]
                if entry.payload is not None:
                    size += len(entry.payload)
                if entry.headers is not None:
                    size += len(entry.headers)
            origin.running.discard(entry)
            if lane is not None and origins.get(origin.name) is origin:
                if lane.ending is entry:  # it has been handed over
                    lane.ending = None
                else:
                    self._free(lane, now)
        self.memory.payload -= size
        if self.reading:
            # Of what is held only: after a failover another job, of another origin, may have the id.
            self._ended.update((e.id, e.attempt) for e in entries if origins.get(e.origin.name) is e.origin)
        self.suspects.over(entries)
        if early:
            for next_attempt in [early.pop(entry.id) for entry in entries if entry.id in early]:
                if self.holds(next_attempt):
                    self.insert(next_attempt, now)

    def _free(self, lane: Lane, now: float) -> None:
        lane.running = None
        if lane.queue:
            self._arm(lane, now)
        if not lane.queue:
            self._drop_if_empty(lane)

    def again(self, entry: Entry, due: float) -> None:
        """The job runs again at `due`; until then its group waits. Without a group the job is now a delayed one."""
        self.memory.drop(entry)
        entry.origin.running.discard(entry)
        if self.reading and self.holds(entry):
            self._ended[entry.id] = entry.attempt
        self.suspects.over([entry])
        early, lane = self._early.pop(entry.id, None), entry.lane
        if lane is None:
            if early is not None and self.holds(early):
                self.insert(early, due)
        elif self.holds(entry):
            lane.running = None
            if entry.origin.draining:  # it is read again, with its due time, if the origin stays after all
                self._drop_if_empty(lane)
            else:
                if due == inf and lane.queue and lane.queue[0].position < entry.position:
                    due = -inf  # a late one goes first, whatever a person decides: the lane is read from it on
                self._stick(lane, entry, due)

    # -- time ---------------------------------------------------------------------------------------------------

    def next_due(self) -> float | None:
        """When `wake_due` has something to do next."""
        dues = [self.suspects.next_due(), self._ready.next_due()]
        return min((due for due in dues if due is not None), default=None)

    def wake_due(self, now: float) -> None:
        """Let lanes and jobs go on whose time has come; a lane asks for a refill, as soon as there is room for it."""
        self.suspects.wake_due(now)
        for item in self._ready.returning(now):
            if isinstance(item, Lane):
                item.due = None
                self._check_hunger(item)
                self._arm(item, now)
            elif self.memory.jobs.get(item.id) is item:
                self._ready.push(item, item)

    def holds(self, entry: Entry) -> bool:
        """Whether the origin that this entry was read under is still the one that is held."""
        return self.origins.get(entry.origin.name) is entry.origin

    # -- pauses -------------------------------------------------------------------------------------------------

    def pause(self, pauses: Pauses) -> bool:
        """From now on choose nothing of these. Returns whether what has changed concerns an origin that is held; then
        everything is to be read anew. Of others nothing is in memory: what is acquired later is held against these."""
        before = self.pauses
        if pauses == before:
            return False
        self.pauses = NOTHING_PAUSED if pauses == NOTHING_PAUSED else pauses
        changed = (before.origins ^ pauses.origins) | {origin for origin, _ in before.groups ^ pauses.groups}
        if pauses.types == before.types and changed.isdisjoint(self.origins):
            return False
        self.forget_waiting(*self.origins.values())
        return True

    def withholds(self, type: str, origin: str, group: str | None) -> bool:
        """Whether a person has paused a job's type, origin or group."""
        types, origins, groups = self.pauses
        return type in types or origin in origins or (group is not None and (origin, group) in groups)

    # -- figures ------------------------------------------------------------------------------------------------

    def knows(self, job_id: int) -> bool:
        """Whether the job stands in memory."""
        return job_id in self.memory.jobs

    def accounts_for(self, origin: str, group: str | None, position: int) -> bool:
        """Whether a row found by the audit is one that this scheduler is going to read by itself."""
        queue = self.origins.get(origin)
        if queue is None or queue.draining or position > queue.high:
            return True
        lane = queue.lanes.get(group) if group is not None else None
        return lane is not None and lane.more and position > lane.last

    @property
    def unknown(self) -> dict[str, int]:
        """Jobs of types that this process does not know. Any thread may ask."""
        out: dict[str, int] = {}
        for queue in list(self.origins.values()):
            for job_type, count in queue.unknown.copy().items():
                out[job_type] = out.get(job_type, 0) + count
        return out

    def learn(self) -> bool:
        """Know types that have been declared since jobs of them were read and left; then everything is to be read anew.
        Returns whether there are any. Never while a read is under way, which may have left some."""
        declared = {type for type in self._unknown if self._known_type(type)}
        if declared:
            self._unknown -= declared
            self.forget_waiting(*self.origins.values())
        return bool(declared)

    def knows_type(self, type: str) -> bool:
        """Whether this process has a handler for jobs of this type, and has read anew what was left of them before."""
        if type not in self._types and type not in self._unknown and self._known_type(type):
            self._types.add(type)
        return type in self._types

    # -- inside -------------------------------------------------------------------------------------------------

    def _go_on(self, lane: Lane, now: float) -> None:
        """A lane has more or less in memory than before: it may run, or be refilled, or is over."""
        self._check_hunger(lane)
        self._arm(lane, now)
        self._drop_if_empty(lane)

    def _arm(self, lane: Lane, now: float) -> None:
        """Put a lane into the ready queue if its head may run."""
        if lane.running is not None or lane.queued or lane.due is not None or lane in self.crowded or not lane.queue:
            return
        head = lane.queue[0]
        if not self._may_run(lane, head, now):
            return
        if (head.attempt > 1 or head.type in self._shares) and not lane.back:
            lane.size = sum(entry.size for entry in lane.queue)
            if not self._ready.let_back(lane, (head.priority, head.type)):
                self._stick(lane, head, now)
                return
        lane.queued = True
        self._ready.push(lane, head)

    def _may_run(self, lane: Lane, head: Entry, now: float) -> bool:
        """Whether the head of a lane may run now; if not, the lane waits."""
        if head.due is None and self.pauses is NOTHING_PAUSED and head.type in self._types:
            return True
        if head.due is not None and head.due > now:
            self._stick(lane, head, head.due)
            return False
        if self.pauses is not NOTHING_PAUSED and self.withholds(head.type, lane.origin.name, lane.group):
            self._stick(lane, head, inf)
            return False
        if head.type not in self._types and not self.knows_type(head.type):
            if lane.blocked_by != head.id:
                self._meet_unknown(head)
            self._stick(lane, head, now + _UNKNOWN_SECONDS)
            lane.blocked_by = head.id
            return False
        return True

    def _meet_unknown(self, entry: Entry) -> None:
        job_type, met = entry.type, entry.origin.unknown
        if job_type not in self._unknown:
            self._unknown.add(job_type)
            what = "declare it"
            if job_type.startswith("message:"):  # a stored message
                what = "declare the topic's consumer, which stateless=True must not be"
            log.warning(
                "jobs of the type %r wait, since this process has no handler for it: %s, or end them, where no release "
                "has one any more (`sidings jobs discard --type %s`)",
                *(job_type, what, shlex.quote(job_type) if job_type.isprintable() else "TYPE"),
            )
        met[job_type] = met.get(job_type, 0) + 1

    def _stick(self, lane: Lane, head: Entry, due: float) -> None:
        self._compact(lane, head.position)
        lane.line, lane.size = (head.priority, head.type), head.size
        lane.due = due
        self._ready.delay(lane, due)

    def _compact(self, lane: Lane, position: int) -> None:
        """Drop a lane's fetched jobs; it is to be read again from `position`, or from a late job before it."""
        if lane.queue:
            position = min(position, lane.queue[0].position)
            for entry in lane.queue:
                self.memory.drop(entry)
            lane.queue.clear()
        lane.more = True
        lane.last = position - 1
        lane.version += 1
        self.hungry.pop(lane, None)
        self._ready.leave(lane)

    def _check_hunger(self, lane: Lane) -> None:
        if lane.back and lane.queue:  # it has what it needs until it runs, and no room for more, perhaps
            return
        if lane.more and lane.due is None and len(lane.queue) <= self.memory.keep // 4:
            self.hungry[lane] = None

    def _drop_if_empty(self, lane: Lane) -> None:
        if lane.queue or lane.running is not None:
            return
        if not lane.more and not lane.queued and lane not in self.crowded and lane.due is None:
            lane.origin.lanes.pop(lane.group, None)
            self._ready.leave(lane)

    def _discard_waiting(self, entry: Entry) -> None:
        """Take a waiting job out: a read has brought it with another position."""
        self.memory.drop(entry)
        if self.suspects.remove(entry):
            return
        if entry.lane is not None:
            entry.lane.queue.remove(entry)
        else:
            self._ready.remove({entry})
