"""Schedules: which ticks there are, over changes of the clock too, and which of them become jobs."""

import inspect
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise
from typing import get_args
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sidings import ConfigurationError, Job, Registry
from sidings.jobs import Periodic, Tick, upcoming
from sidings.jobs.periodic import MOST_MISSED, Cron, Every, Missed

from . import guide

TALLINN = ZoneInfo(
    "Europe/Tallinn"
)  # 2026: forward on 29 March from 03:00 to 04:00, back on 25 October from 04:00 to 03:00


naive = datetime.fromisoformat


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def local(schedule: Cron, start: str, count: int) -> list[str]:
    """The next ticks after a UTC time, as the clock in Tallinn shows them."""
    time, out = utc(start), list[str]()
    for _ in range(count):
        time = schedule.after(time)
        out.append(time.astimezone(TALLINN).strftime("%m-%d %H:%M %z"))
    return out


def test_a_cron_expression_is_read_in_its_time_zone() -> None:
    nightly = Cron("0 6 * * MON-FRI", "Europe/Tallinn")
    assert local(nightly, "2026-07-02T12:00", 3) == ["07-03 06:00 +0300", "07-06 06:00 +0300", "07-07 06:00 +0300"]
    assert nightly.after(utc("2026-01-05T03:59:59")) == utc("2026-01-05T04:00")
    assert Cron("0 6 * * *", "UTC").after(utc("2026-07-02T12:00")) == utc("2026-07-03T06:00")


def test_a_tick_is_later_than_the_time_asked_about_and_the_latest_may_be_that_time() -> None:
    for schedule in (Cron("*/5 * * * *", "UTC"), Every(300)):
        assert schedule.after(utc("2026-01-01T00:05")) == utc("2026-01-01T00:10")
        assert schedule.after(utc("2026-01-01T00:04:59.999999")) == utc("2026-01-01T00:05")
        assert schedule.latest(utc("2026-01-01T00:05")) == utc("2026-01-01T00:05")
        assert schedule.latest(utc("2026-01-01T00:04:59.999999")) == utc("2026-01-01T00:00")


@pytest.mark.parametrize("expression", ["30 3 * * *", "0,30 3 * * *", "30 3,4 * * *"])
def test_a_time_that_the_day_skips_comes_once_right_after_the_change(expression: str) -> None:
    ticks = local(Cron(expression, "Europe/Tallinn"), "2026-03-28T12:00", 4)
    assert next(tick for tick in ticks if tick.startswith("03-29")) == "03-29 04:00 +0300"
    assert len(set(ticks)) == 4


def test_a_time_that_the_day_has_twice_comes_once() -> None:
    def fresh() -> Cron:  # one that has answered before knows the ticks around
        return Cron("30 3 * * *", "Europe/Tallinn")

    expected = ["10-25 03:30 +0300", "10-26 03:30 +0200"]
    assert local(fresh(), "2026-10-24T12:00", 2) == expected
    assert local(fresh(), "2026-10-25T00:59", 1) == ["10-26 03:30 +0200"]  # asked in the first 03:59
    assert local(fresh(), "2026-10-25T01:15", 1) == ["10-26 03:30 +0200"]  # asked in the second 03:15
    for asked in ("01:15", "01:45"):
        assert fresh().latest(utc(f"2026-10-25T{asked}")) == utc("2026-10-25T00:30")


def test_ticks_every_few_minutes_follow_the_clock_that_runs_on() -> None:
    schedule = Cron("*/20 * * * *", "Europe/Tallinn")
    for start in ("2026-03-28T23:00", "2026-10-24T23:00"):
        ticks = list(islice(schedule.back(utc(start) + timedelta(hours=5)), 15))
        assert all(later - earlier == timedelta(minutes=20) for later, earlier in pairwise(ticks))


ZONES = ["Europe/Tallinn", "America/New_York", "America/Santiago", "Asia/Beirut", "Africa/Casablanca", "UTC"]
EXPRESSIONS = ["30 3 * * *", "0 0 * * *", "*/30 * * * *", "15 1 * * 0", "30 2,3 * * *", "0 0 L * *", "10 1-4 * * *"]


@given(
    st.sampled_from(ZONES),
    st.sampled_from(EXPRESSIONS),
    st.datetimes(naive("2024-01-01"), naive("2027-01-01"), timezones=st.just(UTC)),
)
def test_ticks_do_not_depend_on_when_one_asks(zone: str, expression: str, time: datetime) -> None:
    """Forwards and backwards, with a fresh schedule and with one that has answered before, they are the same row."""
    schedule = Cron(expression, zone)
    following = schedule.after(time)
    assert schedule.latest(time) <= time < following
    assert Cron(expression, zone).latest(following) == following
    assert next(Cron(expression, zone).back(following - timedelta(microseconds=1))) == schedule.latest(time)
    assert Cron(expression, zone).after(schedule.latest(time)) == following


@given(
    st.timedeltas(timedelta(milliseconds=100), timedelta(days=366)),
    st.datetimes(naive("1970-01-01"), naive("2100-01-01"), timezones=st.just(UTC)),
)
def test_periods_are_whole_multiples_since_1970(period: timedelta, time: datetime) -> None:
    schedule = Every(period)
    latest, following = schedule.latest(time), schedule.after(time)
    assert latest <= time < following == latest + period
    assert (latest - datetime(1970, 1, 1, tzinfo=UTC)) % period == timedelta(0)
    assert schedule.after(latest) == following


# -- what becomes of missed ticks ---------------------------------------------------------------------------------


def due(missed: Missed, last: str, time: str) -> list[str]:
    periodic = Periodic(Cron("0 6 * * *", "UTC"), missed)
    return [tick.strftime("%d %H:%M") for tick in periodic.due(utc(last), utc(time))]


def test_one_job_stands_for_all_that_were_missed() -> None:
    assert due("once", "2026-05-01T06:00", "2026-05-04T12:00") == ["04 06:00"]
    assert due("once", "2026-05-04T06:00", "2026-05-05T05:59:59") == []
    assert due("once", "2026-05-04T06:00", "2026-05-05T06:00") == ["05 06:00"]


def test_every_missed_tick_gets_its_job_within_bounds() -> None:
    assert due("all", "2026-05-01T06:00", "2026-05-04T12:00") == ["02 06:00", "03 06:00", "04 06:00"]
    many = Periodic(Every(1), "all").due(utc("2026-05-01T00:00"), utc("2026-05-02T00:00"))
    assert len(many) == MOST_MISSED
    assert many[-1] == utc("2026-05-02T00:00")
    assert many == sorted(set(many))


def test_whether_ticks_are_due_is_told_without_going_through_them() -> None:
    """A thousand for each of 500 origins kept the event loop for ten seconds."""

    class Counting(Cron):
        seen = 0

        def back(self, time: datetime) -> Iterator[datetime]:
            for tick in super().back(time):
                self.seen += 1
                yield tick

    for missed in get_args(Missed):
        counting = Counting("* * * * *", "UTC")
        periodic, time = Periodic(counting, missed), utc("2026-05-08T00:00:30")
        for last in ("2026-05-01T00:00", "2026-05-07T23:59", "2026-05-08T00:00"):
            counting.seen = 0
            told = periodic.is_due(utc(last), time)
            assert counting.seen <= 1
            assert told == bool(periodic.due(utc(last), time))


def test_skipped_ticks_are_those_that_are_late() -> None:
    assert due("skip", "2026-05-01T06:00", "2026-05-04T12:00") == []
    assert due("skip", "2026-05-01T06:00", "2026-05-04T06:00:59") == ["04 06:00"]
    assert due("skip", "2026-05-04T06:00", "2026-05-04T06:00:59") == []


# -- declarations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"cron": "0 25 * * *"}, "Bad hour"),
        ({"cron": "0 6 * *"}, "five fields"),
        ({"cron": "*/5 0 6 * * *"}, "five fields"),
        ({"cron": "@daily"}, "five fields"),
        ({"cron": "0 0 31 2 *"}, "Bad day-of-month"),
        ({"cron": "0 0 * * *", "timezone": "Europe/Talin"}, "timezone='Europe/Talin'"),
        ({"cron": "0 0 * * *", "timezone": "Europe"}, "timezone='Europe'"),
        ({"cron": "0 0 * * *", "every": 30}, "cron expression .* or every="),
        ({}, "cron expression .* or every="),
        ({"every": 0.05}, "0.1 seconds"),
        ({"every": -1}, "0.1 seconds"),
        ({"every": 30, "timezone": "UTC"}, "timezone="),
        ({"every": 30, "missed": "twice"}, "missed='twice'"),
        ({"every": 30, "per": "partition"}, "per='partition'"),
        ({"every": 30, "per": "origin", "home": "positions"}, "home="),
    ],
)
def test_a_wrong_declaration_is_refused_with_the_reason(arguments: dict[str, object], reason: str) -> None:
    registry = Registry()
    with pytest.raises(ConfigurationError, match=f"nightly: .*{reason}"):

        @registry.periodic(**arguments)  # type: ignore[arg-type]
        async def nightly(job: Job[Tick]) -> None: ...

    assert len(registry) == 0


def test_a_periodic_job_is_a_job_type_whose_ticks_are_one_group() -> None:
    registry = Registry()

    @registry.periodic("0 6 * * *", timezone="Europe/Tallinn", timeout=60)
    async def nightly(job: Job[Tick]) -> None: ...

    tick = Tick(scheduled_at=utc("2026-05-01T03:00"))
    assert nightly.group_of(tick) == "nightly"
    assert nightly.timeout == 60
    assert nightly.load(nightly.dump(tick)) == tick
    assert registry["nightly"] is nightly


def test_upcoming_lists_the_next_ticks_of_all_periodic_jobs() -> None:
    registry = Registry()

    @registry.periodic("0 6 * * *", timezone="Europe/Tallinn")
    async def nightly(job: Job[Tick]) -> None: ...

    @registry.periodic(every=3600, per="origin", name="hourly")
    async def each_hour(job: Job[Tick]) -> None: ...

    @registry.job()
    async def other(job: Job[Tick]) -> None: ...

    assert upcoming(registry, utc("2026-05-01T12:30"), 2) == [
        ("hourly", "every 3600 s", "origin", [utc("2026-05-01T13:00"), utc("2026-05-01T14:00")]),
        ("nightly", "0 6 * * *, Europe/Tallinn", "service", [utc("2026-05-02T03:00"), utc("2026-05-03T03:00")]),
    ]


def test_the_documentations_example_works(capsys: pytest.CaptureFixture[str]) -> None:
    names = guide.run("periodic.md", "", "What comes next")
    assert [job_type.name for job_type in names["jobs"]] == ["send_daily_report", "sweep"]
    assert "send_daily_report 0 6 * * MON-FRI, Europe/Tallinn service" in capsys.readouterr().out


def test_the_documentation_lists_every_argument() -> None:
    page = (guide.DOCS / "periodic.md").read_text().split("\n## ")[0]
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    arguments = set(inspect.signature(Registry.periodic).parameters) - {"self"}
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == arguments
