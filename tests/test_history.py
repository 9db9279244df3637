"""The analysis of histories against plain computations over the same rows, on a real Postgres and a real Spark."""

import asyncio
import math
import shutil
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Generator
from datetime import UTC, datetime, timedelta, timezone
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from sidings.devstack.databases import create_database, drop_database
from sidings.errors import ConfigurationError
from sidings.spark_analytics.history import TABLES, Facts, Selection, analyse, blocked, reading, report
from sidings.spark_analytics.history.capacity import capacity, concurrency
from sidings.spark_analytics.history.compare import compare
from sidings.spark_analytics.history.findings import duration, findings
from sidings.spark_analytics.history.plots import lines
from sidings.spark_analytics.history.volume import bins_of, by_type, counted, throughput

from .history_support import (
    DAY,
    Attempt,
    Stop,
    blocked_seconds,
    moved,
    odd_history,
    quantile,
    random_history,
    stops,
    store,
)

pytestmark = pytest.mark.timeout(600)  # the first test waits for Spark to start and for all tables
ROWS = random_history(7, 1_200) + odd_history()
EARLIER = [
    # A tenth as long as that one day before; the same otherwise.
    Attempt(**{**vars(r), "finished": r.started + (r.finished - r.started) / 10}) if r.started else r
    for r in moved(ROWS, timedelta(days=-1), 100_000)
]
WINDOW = Selection(DAY, DAY + timedelta(days=1))
BEFORE = Selection(DAY - timedelta(days=1), DAY)
FAILED = ("retried", "discarded", "followed", "held", "lost")


@pytest.fixture(scope="module")
def stored(sidings_postgres: str, sidings_template: Callable[[], Coroutine[None, None, str]]) -> Generator[str]:
    """A database with both days."""

    async def make() -> str:
        return await create_database(sidings_postgres, "history", template=await sidings_template())

    dsn = asyncio.run(make())
    store(dsn, ROWS + EARLIER)
    yield dsn
    asyncio.run(drop_database(sidings_postgres, dsn))


@pytest.fixture(scope="module")
def out(spark: SparkSession, stored: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where an analysis of the day, compared with the one before, has put its tables."""
    folder = tmp_path_factory.mktemp("history")
    spark.conf.set("spark.sql.parquet.outputTimestampType", "INT96")  # as by default
    with reading(spark, WINDOW, postgres=stored) as attempts, reading(spark, BEFORE, postgres=stored) as earlier:
        analyse(attempts, WINDOW, folder, before=(earlier, BEFORE), instance_concurrency=2, utilisation=0.001)
    return folder


@pytest.fixture(scope="module")
def table(out: Path) -> Callable[[str], pd.DataFrame]:
    return lambda name: pd.read_parquet(out / f"{name}.parquet")


def bucket(time: datetime) -> datetime:
    step = WINDOW.step.total_seconds()
    return datetime.fromtimestamp(time.timestamp() // step * step, UTC)


def test_every_answer_is_a_table_of_one_file(out: Path):
    for name in TABLES:
        assert len(list((out / f"{name}.parquet").glob("part-*.parquet"))) == 1, name


def test_times_have_their_zone_whatever_the_session_says(spark: SparkSession, table: Callable[[str], pd.DataFrame]):
    """They had none, by default, and the page's plots found no time of theirs: throughput was a line at zero."""
    assert spark.conf.get("spark.sql.parquet.outputTimestampType") == "INT96", "the session is as it was"
    kinds = {str(kind) for name in TABLES for kind in table(name).dtypes if str(kind).startswith("datetime")}
    assert kinds == {"datetime64[us, UTC]"}


def test_what_matters_most_comes_first(table: Callable[[str], pd.DataFrame]):
    for name, column in (
        ("types", "attempts"), ("errors", "attempts"), ("blocked", "blocked_seconds"), ("still_failing", "seconds"),
        ("blocked_by_error", "blocked_seconds"), ("slowest_groups", "mean_seconds"), ("capacity", "mean_running"),
    ):  # fmt: skip
        values = list(table(name)[column])
        assert len(values) > 2, name
        assert values == sorted(values, reverse=True), name
    assert table("regressions")["verdict"].iloc[0] == "worse"
    for name in ("throughput", "rates", "durations", "concurrency"):
        own = table(name)
        assert list(own["bucket"][own["type"] == "type 0"]) == sorted(own["bucket"][own["type"] == "type 0"]), name


def test_throughput_and_rates_count_each_attempt_once(table: Callable[[str], pd.DataFrame]):
    counted = Counter((r.type, bucket(r.finished), r.outcome) for r in ROWS)
    rates = table("rates")
    for row in rates.to_dict("records"):
        own = {o: n for (t, b, o), n in counted.items() if (t, b) == (row["type"], row["bucket"])}
        assert row["attempts"] == sum(own.values())
        assert {o: row[o] for o in own} == own
        assert row["error_rate"] == pytest.approx(sum(own.get(o, 0) for o in FAILED) / sum(own.values()))
        for outcome in ("retried", "lost", "discarded"):
            assert row[f"{outcome}_rate"] == pytest.approx(own.get(outcome, 0) / sum(own.values()))
    assert rates["attempts"].sum() == len(ROWS)
    throughput = table("throughput")
    ended = sum(r.outcome in ("succeeded", "discarded", "followed", "cancelled", "superseded") for r in ROWS)
    assert throughput["jobs"].sum() == ended
    assert throughput["jobs_per_second"].sum() * WINDOW.step.total_seconds() == pytest.approx(ended)
    assert throughput["run_seconds"].sum() == pytest.approx(sum(r.run or 0 for r in ROWS))


def test_quantiles_are_within_one_percent(table: Callable[[str], pd.DataFrame]):
    values: dict[object, list[Attempt]] = defaultdict(list)
    for row in ROWS:
        if row.started:
            values[row.type, bucket(row.finished)].append(row)
            values[row.type].append(row)
    for row in [*table("durations").to_dict("records"), *table("types").to_dict("records")]:
        own = values[(row["type"], row["bucket"]) if "bucket" in row else row["type"]]
        assert row["started"] == len(own)
        if not own:
            assert pd.isna(row["wait_p50_seconds"])
            continue
        if "bucket" not in row:
            assert row["run_mean_seconds"] == pytest.approx(sum(r.run for r in own) / len(own))
        for measure in ("wait", "run", "total"):
            exact = [seconds for r in own if (seconds := getattr(r, measure)) is not None]
            if not exact:
                assert pd.isna(row[f"{measure}_max_seconds"])
                continue
            assert row[f"{measure}_p99_seconds"] <= row[f"{measure}_max_seconds"]
            assert row[f"{measure}_max_seconds"] == pytest.approx(max(exact), abs=1e-6)
            for share in (50, 90, 95, 99):
                expected = quantile(exact, share / 100)
                assert row[f"{measure}_p{share}_seconds"] == pytest.approx(expected, rel=0.0101, abs=2e-6)


def test_groups_were_blocked_as_long_as_somebody_waited_behind_a_failure(table: Callable[[str], pd.DataFrame]):
    expected = blocked_seconds(ROWS)
    assert len(expected) > 10
    assert not any(group == "parallel" for _, group in expected), "the history has stops of parallel groups"
    found = {
        (r["origin"], r["group"]): (r["blocked_seconds"], r["delayed_job_seconds"])
        for r in table("blocked").to_dict("records")
    }
    assert found == {key: pytest.approx(value, abs=1e-3) for key, value in expected.items()}
    by_error = table("blocked_by_error")
    assert by_error["blocked_seconds"].sum() == pytest.approx(sum(b for b, _ in expected.values()))
    assert set(by_error["error_fingerprint"].dropna()) == {"fp0", "fp1", "fp2"}


def summed(rows: list[Stop]) -> dict[str, object]:
    return {
        "stops": len(rows),
        "jobs": len({s.attempt.job for s in rows}),
        "longest_seconds": pytest.approx(max(s.blocked for s in rows), abs=1e-6),
        "delayed_job_seconds": pytest.approx(sum(s.delayed for s in rows), abs=1e-3),
        "first": min(s.attempt.finished for s in rows),
        "last": max(s.end for s in rows),
    }


def test_stops_are_counted_by_group_and_by_error(table: Callable[[str], pd.DataFrame]):
    groups: dict[tuple[object, ...], list[Stop]] = defaultdict(list)
    causes: dict[tuple[object, ...], list[Stop]] = defaultdict(list)
    for stop in stops(ROWS):
        groups[stop.attempt.origin, stop.attempt.group].append(stop)
        causes[stop.attempt.type, stop.attempt.error].append(stop)
    for row in table("blocked").to_dict("records"):
        expected = summed(groups.pop((row["origin"], row["group"])))
        assert {name: row[name] for name in expected} == expected
    for row in table("blocked_by_error").to_dict("records"):
        own = causes.pop((row["type"], row["error_fingerprint"]))
        expected = summed(own) | {
            "groups": len({(s.attempt.origin, s.attempt.group) for s in own}),
            "error_class": own[0].attempt.error and "Broken",
        }
        assert {name: row[name] for name in expected} == expected
    assert not groups
    assert not causes


def test_heads_that_still_fail_are_told_apart(table: Callable[[str], pd.DataFrame]):
    jobs: dict[int, list[Attempt]] = defaultdict(list)
    for row in sorted(ROWS, key=lambda r: r.attempt):
        if row.group:
            jobs[row.job].append(row)
    failing = {job: own for job, own in jobs.items() if own[-1].outcome in ("retried", "held", "lost")}
    found = {r["job_id"]: r for r in table("still_failing").to_dict("records")}
    assert set(found) == set(failing)
    assert any(len(own) > 1 for own in failing.values())
    for job, own in failing.items():
        failures = [r for r in own if r.outcome in ("retried", "held")]
        since = (failures or [r for r in own if r.outcome == "lost"])[0].finished
        assert (found[job]["failures"], found[job]["failing_since"]) == (len(failures), since)
        assert found[job]["outcome"] == own[-1].outcome  # a head that is held stops its group, if its type says so
        assert found[job]["seconds"] == pytest.approx((WINDOW.until - since).total_seconds())
        assert found[job]["error_fingerprint"] == own[-1].error


def test_concurrency_is_the_time_that_handlers_ran(table: Callable[[str], pd.DataFrame]):
    found = table("concurrency")
    seconds = WINDOW.step.total_seconds()
    ran = sum(r.run for r in ROWS if r.run)
    assert found[found["type"].isna()]["mean_running"].sum() * seconds == pytest.approx(ran, rel=1e-6)
    assert found[found["type"].notna()]["mean_running"].sum() * seconds == pytest.approx(ran, rel=1e-6)
    tick = seconds / 50
    by_tick: dict[float, float] = defaultdict(float)
    for row in ROWS:
        if row.started:
            begin, end = row.started.timestamp(), row.finished.timestamp()
            for number in range(int(begin // tick), int(end // tick) + 1):
                by_tick[number] += max(0.0, min(end, (number + 1) * tick) - max(begin, number * tick)) / tick
    assert found[found["type"].isna()]["peak_running"].max() == pytest.approx(max(by_tick.values()), rel=1e-4)


def test_instances_follow_littles_law(table: Callable[[str], pd.DataFrame]):
    [row] = table("capacity").query("type.isna()").to_dict("records")
    runs = [r.run for r in ROWS if r.run is not None]
    assert row["ready_per_second"] == pytest.approx(len(runs) / 86_400)
    assert row["mean_running"] == pytest.approx(row["ready_per_second"] * row["run_mean_seconds"])
    busiest = max(Counter(bucket(r.ready) for r in ROWS if r.started).values()) / WINDOW.step.total_seconds()
    assert row["busiest_per_second"] == pytest.approx(busiest)
    assert row["run_mean_seconds"] == pytest.approx(sum(runs) / len(runs))
    assert row["busiest_instances"] == math.ceil(busiest * sum(runs) / len(runs) / (2 * 0.001)) > 2
    assert row["instances"] == math.ceil(sum(runs) / 86_400 / (2 * 0.001)) > 2


def test_errors_are_clustered(table: Callable[[str], pd.DataFrame]):
    found = {r["error_fingerprint"]: r for r in table("errors").to_dict("records")}
    for name in ("fp0", "fp1", "fp2"):
        own = [r for r in ROWS if r.error == name]
        row = found.pop(name)
        assert (row["attempts"], row["jobs"]) == (len(own), len({r.job for r in own}))
        assert row["groups"] == len({(r.origin, r.group) for r in own if r.group})
        assert list(row["types"]) == sorted({r.type for r in own})
        assert row["first"] == min(r.finished for r in own)
        assert row["last"] == max(r.finished for r in own)
        ends = Counter(r.outcome for r in own)
        assert all(row[outcome] == ends[outcome] > 0 for outcome in ("retried", "discarded", "followed", "held"))
        latest = max(own, key=lambda r: (r.finished, r.job, r.attempt))
        assert (row["example_job"], row["example"]) == (latest.job, f"message <script>{latest.job}")
    assert not found


def test_skew_is_that_of_the_textbook(table: Callable[[str], pd.DataFrame]):
    found = {r["dimension"]: r for r in table("skew").to_dict("records")}
    for dimension, key in {
        "type": lambda r: r.type,
        "origin": lambda r: r.origin,
        "group": lambda r: (r.origin, r.group),
    }.items():
        sizes = sorted(Counter(key(r) for r in ROWS if dimension != "group" or r.group is not None).values())
        differences = sum(abs(a - b) for a in sizes for b in sizes)
        assert found[dimension]["gini"] == pytest.approx(differences / (2 * len(sizes) * sum(sizes)))
        assert (found[dimension]["members"], found[dimension]["largest"]) == (len(sizes), sizes[-1])
        assert found[dimension]["median"] == quantile(sizes, 0.5)
        assert found[dimension]["largest_over_median"] == sizes[-1] / quantile(sizes, 0.5)
        assert found[dimension]["largest_share"] == sizes[-1] / sum(sizes)


def test_the_heaviest_members_have_their_shares(table: Callable[[str], pd.DataFrame]):
    found = table("heaviest")
    for dimension, key in {"type": lambda r: r.type, "origin": lambda r: r.origin}.items():
        ran: Counter[str] = Counter()
        for row in ROWS:
            ran[key(row)] += row.run or 0
        expected = [
            (name, n, pytest.approx(n / len(ROWS)), pytest.approx(ran[name]), pytest.approx(ran[name] / ran.total()))
            for name, n in sorted(Counter(map(key, ROWS)).items(), key=lambda item: (-item[1], item[0]))
        ]
        own = found[found["dimension"] == dimension]
        assert list(own["rank"]) == list(range(1, len(expected) + 1))
        columns = own[["name", "attempts", "share", "run_seconds", "run_share"]]
        assert list(columns.itertuples(index=False, name=None)) == expected
    groups = Counter((r.origin, r.group) for r in ROWS if r.group is not None)
    assert len(groups) > 20
    own = found[found["dimension"] == "group"]
    assert list(own["attempts"]) == sorted(groups.values(), reverse=True)[:20]
    assert list(own["share"]) == pytest.approx([n / groups.total() for n in own["attempts"]])


def test_the_slowest_group_has_the_longest_mean_time(table: Callable[[str], pd.DataFrame]):
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in ROWS:
        if row.group and row.started:
            times[row.origin, row.group].append(row.wait + row.run)
    expected = {k: sum(v) / len(v) for k, v in times.items() if len(v) >= 3}
    rows = table("slowest_groups").to_dict("records")
    found = {(r["origin"], r["group"]): r["mean_seconds"] for r in rows}
    assert found == {k: pytest.approx(v) for k, v in expected.items()}
    assert list(found) == sorted(expected, key=lambda k: -expected[k])
    for row in rows:
        own = [r for r in ROWS if (r.origin, r.group) == (row["origin"], row["group"])]
        assert (row["attempts"], row["failed"]) == (len(own), sum(r.outcome in FAILED for r in own))
        assert row["wait_max_seconds"] == pytest.approx(max(r.wait or 0 for r in own), abs=1e-6)
        assert row["run_max_seconds"] == pytest.approx(max(r.run or 0 for r in own), abs=1e-6)


def test_a_regression_is_reported_and_a_small_sample_is_not(table: Callable[[str], pd.DataFrame]):
    found = {(r["type"], r["measure"]): r for r in table("regressions").to_dict("records")}
    sizes = Counter(r.type for r in ROWS if r.started)
    assert found["type 0", "run_p50"]["verdict"] == "worse"
    assert found["type 0", "error_rate"]["verdict"] == "same"
    assert found["type 0", "wait_p50"]["verdict"] == "same"
    small = [t for t, n in sizes.items() if n < 100]
    assert small
    assert {r["verdict"] for (t, m), r in found.items() if t in small and m != "error_rate"} == {"too few"}
    worse = found["type 0", "run_p50"]
    assert worse["before_n"] == worse["after_n"] == sizes["type 0"]
    assert worse["after"] == pytest.approx(
        quantile((r.run for r in ROWS if r.type == "type 0" and r.started), 0.5), rel=0.011
    )
    assert worse["before_low"] <= worse["before"] <= worse["before_high"] < worse["after_low"] <= worse["after_high"]
    # Conover's ranks.
    for rows, side in ((EARLIER, "before"), (ROWS, "after")):
        runs = sorted(r.run for r in rows if r.type == "type 0" and r.run is not None)
        for percent in (50, 95):
            middle, share = len(runs) * percent / 100, percent / 100
            spread = 2.576 * math.sqrt(middle * (1 - share))
            low, high = math.floor(middle - spread), math.ceil(middle + spread) + 1
            row = found["type 0", f"run_p{percent}"]
            assert row[f"{side}_low"] == pytest.approx(runs[low - 1], rel=0.011)
            assert row[f"{side}_high"] == pytest.approx(runs[min(high, len(runs)) - 1], rel=0.011)


def test_what_is_worse_is_much_certain_and_often_enough_seen(spark: SparkSession):
    """type: attempts, how many failed, milliseconds that each ran; in the earlier window and in the later one."""
    cases = {
        "few after": ((150, 0, 1_000), (99, 0, 10_000)),
        "few before": ((99, 0, 1_000), (150, 0, 10_000)),
        "new": ((0, 0, 0), (150, 0, 10_000)),
        "slower": ((100, 0, 1_000), (100, 0, 10_000)),
        "faster": ((100, 0, 10_000), (100, 0, 1_000)),
        "a little slower": ((1_000, 0, 1_000), (1_000, 0, 1_100)),
        "slower by nothing": ((100, 0, 2), (100, 0, 6)),
        "fails, perhaps": ((200, 10, 5), (200, 26, 5)),
        "fails, but seldom": ((4_000, 0, 5), (4_000, 16, 5)),
        "fails": ((200, 10, 5), (200, 60, 5)),
    }
    windows: list[tuple[DataFrame, DataFrame]] = []
    for side in (0, 1):
        rows = [
            (kind, "retried" if n < failed else "succeeded", 0, 0, 0, ran * 1_000)
            for kind, sides in cases.items()
            for count, failed, ran in [sides[side]]
            for n in range(count)
        ]
        columns = "type string, outcome string, enqueued bigint, ready bigint, started bigint, finished bigint"
        attempts = spark.createDataFrame(rows, columns)
        windows.append((counted(attempts, WINDOW), by_type(bins_of(attempts, WINDOW))))
    found = {(r.type, r.measure): r.verdict for r in compare(*windows[0], *windows[1]).collect()}
    assert {kind: (found[kind, "run_p50"], found[kind, "error_rate"]) for kind in cases} == {
        "few after": ("too few", "too few"),
        "few before": ("too few", "too few"),
        "new": ("too few", "too few"),
        "slower": ("worse", "same"),
        "faster": ("better", "same"),
        "a little slower": ("same", "same"),
        "slower by nothing": ("same", "same"),
        "fails, perhaps": ("same", "same"),
        "fails, but seldom": ("same", "same"),
        "fails": ("same", "worse"),
    }


def test_what_fails_from_none_before_comes_before_what_fails_a_little_more(spark: SparkSession):
    """It came last, and fell off the page. type: failed of 1,000 attempts, and milliseconds each, in either window."""
    cases = {"new": ((0, 5), (40, 5)), **{f"slower {n}": ((0, 1_000), (0, 1_300)) for n in range(3)}}
    windows: list[tuple[DataFrame, DataFrame]] = []
    for side in (0, 1):
        columns = "type string, outcome string, enqueued bigint, ready bigint, started bigint, finished bigint"
        rows = [
            (kind, "retried" if n < failed else "succeeded", 0, 0, 0, ran * 1_000)
            for kind, sides in cases.items()
            for failed, ran in [sides[side]]
            for n in range(1_000)
        ]
        attempts = spark.createDataFrame(rows, columns)
        windows.append((counted(attempts, WINDOW), by_type(bins_of(attempts, WINDOW))))
    found = compare(*windows[0], *windows[1]).toPandas()
    worse = found[found["verdict"] == "worse"]
    assert (worse.iloc[0]["type"], worse.iloc[0]["measure"]) == ("new", "error_rate")
    assert len(worse) > 3
    none = {name: pd.DataFrame() for name in ("still_failing", "blocked_by_error", "types")}
    told = [each.text for each in findings(none | {"regressions": found, "skew": pd.DataFrame(columns=["dimension"])})]
    assert told[0] == "new: error_rate is 4.00%, from none before"
    assert told[3:] == [f"{len(worse) - 3} more measures are worse than before"]


def test_filters_choose_types_and_origins(spark: SparkSession, stored: str):
    only = Selection(DAY, DAY + timedelta(hours=1, minutes=10), types=("type 0", "it's"), origins=("t/1",))
    with reading(spark, only, postgres=stored) as attempts:
        found = {(r.job_id, r.attempt) for r in attempts.select("job_id", "attempt").collect()}
    assert found == {
        (r.job, r.attempt) for r in ROWS if r.type == "type 0" and r.origin == "t/1" and r.finished < only.until
    }
    assert found


def test_at_the_windows_edges_a_bucket_is_shorter(spark: SparkSession, stored: str):
    hour, half = DAY + timedelta(hours=1), timedelta(milliseconds=500)
    short = Selection(hour + timedelta(seconds=62) + half, hour + timedelta(seconds=112) + half)
    assert short.step == timedelta(seconds=1)
    inside = [r for r in ROWS if short.since <= r.finished < short.until]
    with reading(spark, short, postgres=stored) as attempts:
        assert attempts.count() == len(inside) > 20
        rows = {
            (r.type, r.bucket.astimezone(UTC)): (r.jobs, r.jobs_per_second)
            for r in throughput(counted(attempts, short), short).collect()
        }
        for (_, begin), (jobs, rate) in rows.items():
            at_an_edge = begin < short.since or begin + short.step > short.until
            assert rate == pytest.approx(jobs / (0.5 if at_an_edge else 1.0))
        assert any(begin < short.since for _, begin in rows)
        assert any(begin + short.step > short.until for _, begin in rows)
        together = [r for r in concurrency(attempts, short).collect() if r.type is None]
        assert len(together) == 51, "a bucket of a second for each that the window touches"
        [needed] = [r for r in capacity(attempts, short).collect() if r.type is None]
        tiny = Selection(short.since, short.since + half)  # less than a bucket
        own = attempts.where(f.col("finished") < tiny.until_us)
        [busiest] = [r.busiest_per_second for r in capacity(own, tiny, utilisation=1).collect() if r.type is None]
        assert busiest == sum(r.finished < tiny.until for r in inside if r.started) / 0.5 > 0
    ran = sum(max(0.0, (r.finished - max(r.started, short.since)).total_seconds()) for r in inside if r.started)
    seconds = [0.5, *[1.0] * 49, 0.5]
    assert sum(r.mean_running * s for r, s in zip(together, seconds, strict=True)) == pytest.approx(ran, rel=1e-6)
    ready = Counter(int(max(r.ready, short.since).timestamp()) for r in inside if r.started)
    assert needed.busiest_per_second == max(ready.values()), "what was ready before is work of the first bucket"


@pytest.mark.long
def test_at_the_windows_edges_a_tick_is_shorter(spark: SparkSession):
    """As it is where a window ends now. Its last bucket was told as nearly idle, whatever ran."""
    window = Selection(DAY + timedelta(seconds=899), DAY + timedelta(hours=12, seconds=3))
    assert window.step == timedelta(minutes=5)  # a tick has 6 s
    each = timedelta(seconds=0.5)
    at = [window.since - each + n * each for n in range(round(window.seconds * 2) + 1)]  # two are at work all the time
    rows = [Attempt(job, 1, "succeeded", a, b, a) for job, (a, b) in enumerate(pairwise(at))]
    rows = [row for row in (*rows, *rows) if window.since <= row.finished < window.until]
    frame = spark.createDataFrame(
        [(r.type, round(r.enqueued.timestamp() * 1e6), round(r.finished.timestamp() * 1e6)) for r in rows],
        "type STRING, started LONG, finished LONG",
    )
    found = concurrency(frame, window).where("type = 'a'").collect()
    for row in found[:-1]:
        assert (row.mean_running, row.peak_running) == (pytest.approx(2), pytest.approx(2)), row.bucket
    # What had not ended at the window's end is not in the history.
    assert found[-1].mean_running == found[-1].peak_running == pytest.approx(2 * 2.5 / 3)


def test_stops_that_last_for_weeks_are_looked_for_in_longer_pieces_of_time(
    spark: SparkSession, stored: str, monkeypatch: pytest.MonkeyPatch
):
    with reading(spark, WINDOW, postgres=stored) as attempts:
        pieces = blocked.pieces(attempts).persist()
        minutes = int(sum((r.end - r.begin) / 60e6 for r in pieces.collect()))
        monkeypatch.setattr(blocked, "_MOST_PLACES", minutes // 7)
        found = blocked.stops(attempts, pieces).groupBy("origin", "group").sum("blocked").collect()
        pieces.unpersist()
    expected = {key: pytest.approx(value, abs=1e-3) for key, (value, _) in blocked_seconds(ROWS).items()}
    assert {(origin, group): micros / 1e6 for origin, group, micros in found} == expected


@pytest.mark.long
def test_a_history_of_one_attempt_has_all_tables_and_a_page(
    spark: SparkSession, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The least that there can be: one that never started, without a group and without an error."""
    one = next(r for r in ROWS if r.type == "only lost")
    store(database, [one, *moved([one], timedelta(days=-1), 1)])
    monkeypatch.chdir(tmp_path)  # Java stays where it is
    folder = Path("until 06:00")
    with reading(spark, WINDOW, postgres=database) as attempts, reading(spark, BEFORE, postgres=database) as earlier:
        analyse(attempts, WINDOW, folder, before=(earlier, BEFORE))
    html = report(folder, Facts("here", WINDOW, BEFORE))
    assert "1 attempts" in html
    assert "nan" not in html.lower()
    sizes = {name: len(pd.read_parquet(folder / f"{name}.parquet")) for name in TABLES}
    assert {name for name, size in sizes.items() if size} == {
        "types", "throughput", "rates", "skew", "heaviest", "regressions"
    }  # fmt: skip


class _Page(HTMLParser):
    """Fails where tags do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)
        assert not any(n in ("src", "srcset") or (n.endswith("href") and not str(v).startswith("#")) for n, v in attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_is_one_page_that_needs_nothing_else(out: Path):
    html = report(out, Facts("db.example/<script>", WINDOW, BEFORE))
    page = _Page()
    page.feed(html)
    assert page.open == []
    assert page.seen["svg"] == 6
    assert page.seen["script"] == 0, "names and messages are escaped"
    assert "message &lt;script&gt;" in html
    assert "_日本語 &lt;b&gt;&amp;" in html
    assert {c for c in html if not c.isprintable()} == {"\n"}
    assert r"$a_b$\x1b\u202e</td>" in html
    assert "<b>&" not in html
    assert f"{len(ROWS):,} attempts" in html
    assert "times as much as before" in html
    totals = pd.read_parquet(out / "types.parquet")["total_p95_seconds"].dropna()
    assert len(totals) > 2
    assert all(f"<td>{duration(seconds)}</td>" in html for seconds in totals)
    assert "@import" not in html
    assert "url(http" not in html


def test_the_page_says_which_stops_it_does_not_know(out: Path):
    """Of a group that stood still over midnight, or whose other types waited, no table tells; and a job that was moved
    away from the only origin that is looked at seems to fail still."""
    other_types = "Jobs of other types that waited behind them are not counted"
    elsewhere = "Jobs that went on at other origins"
    page = report(out, Facts("a test", WINDOW))
    assert "not those that began before it" in page
    assert other_types not in page
    assert elsewhere not in page
    assert other_types in report(out, Facts("a test", Selection(WINDOW.since, WINDOW.until, types=("type 1",))))
    assert elsewhere in report(out, Facts("a test", Selection(WINDOW.since, WINDOW.until, origins=("t/1",))))


def test_what_is_wrong_comes_first(table: Callable[[str], pd.DataFrame]):
    tables = {name: table(name) for name in TABLES}
    tables["blocked_by_error"]["longest_seconds"] = [700.0, *[500.0] * (len(tables["blocked_by_error"]) - 1)]
    tables["still_failing"]["error_class"] = None
    found = findings(tables)
    levels = [finding.level for finding in found]
    assert levels == sorted(levels), "bad before warn"
    of_blocked = [finding for finding in found if " blocked " in finding.text]
    assert [finding.level for finding in of_blocked] == ["bad", "warn", "warn"]
    assert not any("None" in finding.text or "nan" in finding.text for finding in found)


def test_what_is_wrong_is_told_in_sentences():
    nothing = {"before": 1.0, "after": 3.0, "verdict": "same"}
    quiet = {"succeeded": 1, "retried": 0, "snoozed": 0, "held": 0, "discarded": 0, "lost": 0, "error_rate": 0.049,
             "wait_p95_seconds": 1.0, "run_p95_seconds": 0.01}  # fmt: skip
    blocking = {"groups": 7, "blocked_seconds": 8_000.0, "longest_seconds": 600.0}
    tables: dict[str, list[dict[str, object]]] = {
        "regressions": [
            {**nothing, "type": "slow", "measure": "run_p50", "verdict": "worse"},
            {**nothing, "type": "new", "measure": "error_rate", "before": 0.0, "after": 0.5, "verdict": "worse"},
            {**nothing, "type": "fast", "measure": "run_p50", "verdict": "better"},
        ],
        "still_failing": [
            {"seconds": 90.0, "job_id": 5, "group": "g", "origin": "t/0", "error_class": "Broken"},
            {"seconds": 80.0, "job_id": 6, "group": "h", "origin": "t/0", "error_class": None},
        ],
        "blocked_by_error": [
            {**blocking, "type": "a", "error_class": "Broken"},
            {**blocking, "type": "b", "error_class": None, "longest_seconds": 601.0},
        ],
        "types": [
            {**quiet, "type": "quiet"},
            {**quiet, "type": "given up", "discarded": 1_000},
            {**quiet, "type": "lost", "lost": 2},
            {**quiet, "type": "fails", "error_rate": 0.05},
            {**quiet, "type": "no history", "succeeded": 0, "lost": 2, "error_rate": 1.0},
            {**quiet, "type": "waits", "wait_p95_seconds": 1.1},
            {**quiet, "type": "waits as it runs", "wait_p95_seconds": 10.0, "run_p95_seconds": 1.0},
        ],
        "skew": [
            {"dimension": "type", "largest_over_median": 90.0, "largest_share": 0.9},
            {"dimension": "group", "largest_over_median": 20.0, "largest_share": 0.1},
            {"dimension": "origin", "largest_over_median": 19.0, "largest_share": 0.9},
            {"dimension": "origin", "largest_over_median": 90.0, "largest_share": 0.09},
        ],
    }
    still = "jobs with a group were still failing, or held, at the end; for longest, 90 s, job 5 of g (t/0)"
    found = findings({name: pd.DataFrame(rows) for name, rows in tables.items()})
    assert [(finding.level, finding.section, finding.text) for finding in found] == [
        ("bad", "regressions", "slow: run_p50 is 3 s, 3.0 times as much as before"),
        ("bad", "regressions", "new: error_rate is 50.00%, from none before"),
        ("bad", "blocked", f"2 {still}: Broken"),
        ("bad", "blocked", "b: the loss of an executor blocked 7 groups for 2.22 h together, 10 min at a time at most"),
        ("bad", "errors", "given up: 1,000 jobs were discarded"),
        ("bad", "rates", "fails: 5.0% of all attempts failed"),
        ("warn", "blocked", "a: Broken blocked 7 groups for 2.22 h together, 10 min at a time at most"),
        ("warn", "rates", "lost: 2 attempts were lost with their executors"),
        ("warn", "rates", "no history: 2 attempts were lost with their executors"),
        ("warn", "durations", "waits: of 20 attempts one waited 1.1 s or longer, 19 ran 10 ms at most"),
        ("warn", "skew", "one group has 10% of all attempts, 20 times the median"),
    ]  # fmt: skip
    told = [duration(seconds) for seconds in (None, 5e-4, 0.25, 119.0, 120.0, 7_199.0, 7_200.0, 172_800.0)]
    assert told == ["–", "500 µs", "250 ms", "119 s", "2 min", "120 min", "2 h", "2.0 days"]


def test_of_many_types_the_worst_are_told_and_how_many_more_there_are():
    known = {"succeeded": 1, "retried": 0, "snoozed": 0, "held": 0, "lost": 0, "error_rate": 0.0,
             "wait_p95_seconds": 1.0, "run_p95_seconds": 1.0}  # fmt: skip
    none: dict[str, list[str]] = {"still_failing": [], "blocked_by_error": [], "skew": ["dimension"]}
    tables = {name: pd.DataFrame(columns=columns) for name, columns in none.items()}
    tables["types"] = pd.DataFrame([{**known, "type": f"type {n}", "discarded": n + 1} for n in range(500)])
    assert [finding.text for finding in findings(tables)] == [
        "type 499: 500 jobs were discarded",
        "type 498: 499 jobs were discarded",
        "type 497: 498 jobs were discarded",
        "the same, less of it, of 497 more types",
    ]


@pytest.mark.long
def test_the_page_reads_of_a_long_table_what_it_shows(out: Path, tmp_path: Path):
    folder = tmp_path / "out"
    shutil.copytree(out, folder)
    (file,) = (folder / "still_failing.parquet").glob("*.parquet")
    row = pq.read_table(file).slice(0, 1)
    many = pa.concat_tables([row] * 300_000).combine_chunks()
    at = many.schema.get_field_index("error_message")
    pq.write_table(many.set_column(at, "error_message", pa.array(f"{n} {'x' * 400}" for n in range(300_000))), file)
    tracemalloc.start()
    try:
        html = report(folder, Facts("a test", WINDOW))
        assert tracemalloc.get_traced_memory()[1] < 60_000_000
    finally:
        tracemalloc.stop()
    assert "25 of 300,000; the Parquet table has all." in html
    assert "300,000 jobs with a group were still failing" in html


def test_a_plot_shows_a_standstill_as_one():
    times = pd.to_datetime(range(0, 5_000_000, 1_000_000), unit="us", utc=True)
    some = pd.DataFrame({"bucket": times[[0, 4]], "type": "a", "value": [1.0, 2.0]})
    assert "> _b<" in lines(some.assign(type="_b"), "bucket", "value", "type", "s", times), "it has its legend"
    nothing = lines(some.assign(value=0.0), "bucket", "value", "type", "s", times, log=True)
    assert "</svg>" in nothing
    with_zeros = lines(some, "bucket", "value", "type", "jobs/s", times, missing=0.0)
    assert with_zeros.count("<use") - lines(some, "bucket", "value", "type", "jobs/s", times).count("<use") == 3


@pytest.mark.parametrize("hours", [-14, 0, 14])
def test_a_window_of_all_times_is_one_that_can_be_shown(hours: int):
    zone = timezone(timedelta(hours=hours))
    window = Selection(datetime.min.replace(tzinfo=zone), datetime.max.replace(tzinfo=zone))
    assert window.since == datetime(1970, 1, 1, tzinfo=UTC)
    assert window.until <= datetime.now(UTC)
    times = pd.to_datetime([window.first_bucket_us], unit="us", utc=True)
    table = pd.DataFrame({"bucket": times, "type": "a", "value": 1})
    assert "</svg>" in lines(table, "bucket", "value", "type", "s", times)


def test_a_window_without_sense_is_refused():
    with pytest.raises(ConfigurationError, match="the window is empty"):
        Selection(DAY, DAY)
    with pytest.raises(ConfigurationError, match="no time zone"):
        Selection(DAY.replace(tzinfo=None), DAY)
