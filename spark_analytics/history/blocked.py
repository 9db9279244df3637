"""How long groups stood still behind a head that failed, and by what error.

A *stop* is the time from the end of an attempt that failed (retried, held or lost) to the end of the same job's next
attempt, where the job has a group. It counts as blocked while at least one other job of the group waits in it: ready,
and not started yet. A stop in which another job of the group started blocked nothing and is left out: the group's
policy is ``parallel``, or the failed job was held and had left the order. (So may be one in which the clock went back
by more than an attempt of the job.) So is one that a person ended by releasing a held job, which then waits like
others. The stop belongs to the error that began it; the stops of a job follow each other without a gap, so together
they reach from its first failure to its end.

Of a group all is put in order of time and swept once: with q(t), the jobs that wait at t, the integrals of [q > 0] and
of q are kept as running sums, and a stop is the difference of these sums at its two ends.
"""

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from .order import ordered
from .selection import Selection

__all__ = ["blocked", "blocked_by_error", "pieces", "still_failing", "stops"]

_FAILED = ("retried", "held", "lost")
# At one instant: a job is ready, markers are set, jobs start. So a job that starts as a stop ends did wait for it.
_READY, _MARK, _START = 0, 1, 2
_MINUTE = 60_000_000  # microseconds
_MOST_PLACES = 2_000_000


def _left() -> Column:
    """When a job left the queue."""
    return f.greatest(f.coalesce("started", "finished"), f.col("ready"))


def _keyed(attempts: DataFrame) -> DataFrame:
    """Those with a group, whose name is folded into the number `key`."""
    return attempts.where(f.col("group").isNotNull()).withColumn("key", f.xxhash64("origin", "group"))


def stops(attempts: DataFrame, pieces: DataFrame) -> DataFrame:
    """A row for each stop that blocked: job_id, attempt, origin, group, type, the error; `begin`, `end` and `blocked`,
    in microseconds; `delayed`, microseconds of all waiting jobs together."""
    standing, released = pieces.where(f.col("released").isNull()), pieces.where(f.col("released").isNotNull())
    events = _events(_near(_keyed(attempts), standing), standing, released)
    order = Window.partitionBy("key").orderBy("at", "kind")
    swept = (
        events.withColumn("waiting", f.sum("change").over(order.rowsBetween(Window.unboundedPreceding, 0)))
        .withColumn("past", f.coalesce(f.col("at") - f.lag("at").over(order), f.lit(0)))
        .withColumn("before", f.col("waiting") - f.col("change"))
        .withColumn("blocked", f.when(f.col("before") > 0, f.col("past")).otherwise(0))
        .withColumn("delayed", f.col("past").cast("double") * f.greatest(f.col("before"), f.lit(0)))
    )
    sums = [
        f.sum(c).over(order.rowsBetween(Window.unboundedPreceding, 0)).alias(c)
        for c in ("blocked", "delayed", "starts")
    ]
    marks = swept.select("job_id", "attempt", "side", *sums).where(f.col("side") != 0)

    def difference(column: str) -> Column:
        return f.sum(f.col(column) * f.col("side")).alias(column)

    sides = marks.groupBy("job_id", "attempt").agg(difference("blocked"), difference("delayed"), difference("starts"))
    found = pieces.join(sides, ["job_id", "attempt"])
    blocking = found.where((f.col("starts") == f.col("own")) & (f.col("blocked") > 0))
    return blocking.drop("starts", "own", "key", "released", "left")


def pieces(attempts: DataFrame) -> DataFrame:
    """All stops, whether somebody waits or not; with `released`, when a person ended it by releasing a held job, and
    `left`, when the job left the queue then. `stops` goes over them five times: keep them."""
    again = _keyed(attempts).where(f.col("outcome").isin(*_FAILED) | (f.col("attempt") > 1))
    order = Window.partitionBy("job_id").orderBy(f.desc("attempt"), f.desc("finished"))  # what follows stands before
    following = order.rowsBetween(Window.unboundedPreceding, -1)

    def within(time: Column) -> Column:
        return f.coalesce(((time >= f.col("finished")) & (time < f.col("end"))).cast("int"), f.lit(0))

    # Who waits behind a job that is moved goes with it, and has a row only where both are at last; but once it is held,
    # it leaves them behind.
    place, held = f.struct("key", "origin", "group"), f.col("outcome") == "held"
    there = f.coalesce(f.last(f.when(held, place), ignorenulls=True).over(following), f.first(place).over(following))
    # Of the starts from a stop's begin to before its end, those of the job itself there: its next one, and one that
    # took no time, or that was ready after its end only, for the clock was set back.
    own = within(f.col("next")) + within(f.col("failed"))
    start, next_key = f.when(f.col("started").isNotNull(), _left()), f.lag("key").over(order)
    # A release is the next attempt's due time. A head that kept its place, and was retried by hand, has none.
    ready = f.lag("ready").over(order)
    return (
        again.withColumn("there", there)
        .withColumn("end", f.lag("finished").over(order))
        .withColumn("next", f.when(next_key == f.col("there.key"), f.lag(start).over(order)))
        .withColumn("failed", f.when(f.col("key") == f.col("there.key"), start))
        .withColumn("released", f.when(held & (ready >= f.col("finished")), ready))
        .withColumn("left", f.lag(_left()).over(order))
        .withColumn("key", f.when(f.col("released").isNull(), f.col("there.key")).otherwise(next_key))
        .where(f.col("outcome").isin(*_FAILED) & f.col("end").isNotNull())
        .select(
            "key", "job_id", "attempt", "there.origin", "there.group", "type", "error_fingerprint", "error_class",
            "error_message", "outcome", f.col("finished").alias("begin"), f.greatest("finished", "end").alias("end"),
            own.alias("own"), "released", "left",
        )
    )  # fmt: skip


def _near(grouped: DataFrame, pieces: DataFrame) -> DataFrame:
    """The attempts that a stop of their group may concern, and some that it does not: the rest is not worth sorting.

    Stops leave their group's name in each minute that they touch, and in the one before; an attempt that started within
    the minute after the one in which it was ready needs one look. Names are folded into 2^23 numbers, so that the set
    fits into memory whatever it stands for: two that meet only let more pass. Where stops last for weeks, because jobs
    are held, there would be too many minutes: longer pieces of time are taken.
    """
    lasted = (f.col("end") - f.col("begin")).cast("double")
    [row] = pieces.agg(f.coalesce(f.sum(lasted), f.lit(0)).alias("total")).collect()
    unit = max(_MINUTE, int(row.asDict()["total"]) // _MOST_PLACES)

    def place(time: Column) -> Column:
        return f.pmod(f.xxhash64("key", time), f.lit(1 << 23)).alias("place")

    def time_of(micros: str) -> Column:
        return f.floor(f.col(micros) / unit).cast("bigint")

    times = pieces.select("key", f.explode(f.sequence(time_of("begin") - 1, time_of("end"))).alias("time"))
    always = grouped.sparkSession.range(-1, 0).select(f.col("id").alias("place"))
    places = times.select(place(f.col("time"))).distinct().unionByName(always)
    waited = f.coalesce(time_of("started"), time_of("finished")) - time_of("ready")
    placed = grouped.withColumn("place", f.when(waited > 1, -1).otherwise(place(time_of("ready"))))
    return placed.join(f.broadcast(places), "place", "left_semi").drop("place")


def _events(attempts: DataFrame, pieces: DataFrame, released: DataFrame) -> DataFrame:
    """What happens to groups, in as few bytes as it takes: it is sorted. `side`: -1 where a stop begins, 1 where it
    ends. Jobs wait for their first attempts, and for those that follow a release."""
    nothing, none, one = f.lit(None).cast("bigint"), f.lit(0), f.lit(1)

    def event(at: Column, kind: int, change: Column, starts: Column, side: int = 0) -> Column:
        fields = {"at": at, "kind": f.lit(kind), "change": change, "starts": starts, "side": f.lit(side)}
        job, attempt = (f.col("job_id"), f.col("attempt")) if side else (nothing, nothing.cast("int"))
        return f.struct(*(c.alias(name) for name, c in (fields | {"job_id": job, "attempt": attempt}).items()))

    first = (f.col("attempt") == 1).cast("int")
    waits = f.array(
        event(f.col("ready"), _READY, first, none),
        event(_left(), _START, -first, f.col("started").isNotNull().cast("int")),
    )
    again = f.array(event(f.col("released"), _READY, one, none), event(f.col("left"), _START, -one, none))
    marks = f.array(event(f.col("begin"), _MARK, none, none, -1), event(f.col("end"), _MARK, none, none, 1))
    events = attempts.select("key", f.inline(waits)).unionByName(released.select("key", f.inline(again)))
    return events.unionByName(pieces.select("key", f.inline(marks)))


def blocked(found: DataFrame) -> DataFrame:
    """origin, group; how often and how long it was blocked, job-seconds of delay, jobs that failed, from when to
    when."""
    return ordered(_summed(found, "origin", "group"), f.desc("blocked_seconds"), "origin", "group")


def blocked_by_error(found: DataFrame) -> DataFrame:
    """type, error_fingerprint, error_class (null: an executor died); the same, with how many groups and an example."""
    out = _summed(found, "type", "error_fingerprint", "error_class", groups=True)
    return ordered(out, f.desc("blocked_seconds"), "type", "error_fingerprint")


def _summed(found: DataFrame, *keys: str, groups: bool = False) -> DataFrame:
    many = (
        [f.count_distinct("origin", "group").alias("groups"), f.min("error_message").alias("example")] if groups else []
    )
    return found.groupBy(*keys).agg(
        f.count("*").alias("stops"),
        f.count_distinct("job_id").alias("jobs"),
        (f.sum(f.col("blocked").cast("double")) / 1e6).alias("blocked_seconds"),
        (f.max("blocked") / 1e6).alias("longest_seconds"),
        (f.sum("delayed") / 1e6).alias("delayed_job_seconds"),
        f.timestamp_micros(f.min("begin")).alias("first"),
        f.timestamp_micros(f.max("end")).alias("last"),
        *many,
    )


def still_failing(attempts: DataFrame, selection: Selection) -> DataFrame:
    """Jobs with a group whose last attempt in the window was retried, held or lost: what stands behind them has not
    ended, so a history cannot know it. origin, group, type, job_id; how the last attempt ended; failures in the window,
    since when, the last error."""
    again = attempts.where(f.col("group").isNotNull() & ((f.col("outcome") != "succeeded") | (f.col("attempt") > 1)))
    last = f.max_by(
        f.struct("origin", "group", "type", "outcome", "error_class", "error_message", "error_fingerprint"),
        f.struct("attempt", "finished"),
    )
    failed = f.col("outcome").isin("retried", "held")
    ended = f.col("finished")
    jobs = again.groupBy("job_id").agg(  # its origin changes where it is moved, a message's type with its topic's name
        f.sum(failed.cast("int")).alias("failures"),
        f.coalesce(f.min(f.when(failed, ended)), f.min(f.when(f.col("outcome") == "lost", ended))).alias("first"),
        last.alias("last"),
    )
    # Types without history have what was lost all the same, and not that it succeeded then.
    known = attempts.where(f.col("outcome").isin("succeeded", "retried", "snoozed", "held")).select("type").distinct()
    failing = jobs.where(f.col("last.outcome").isin(*_FAILED)).withColumn("type", f.col("last.type"))
    failing = failing.join(known.withColumn("known", f.lit(True)), "type", "left")
    table = failing.where((f.col("last.outcome") != "lost") | f.col("known")).select(
        "last.origin", "last.group", "type", "job_id", "last.outcome", "failures",
        f.timestamp_micros("first").alias("failing_since"),
        ((f.lit(selection.until_us) - f.col("first")) / 1e6).alias("seconds"),
        "last.error_class", "last.error_message", "last.error_fingerprint",
    )  # fmt: skip
    return ordered(table, f.desc("seconds"), "job_id")
