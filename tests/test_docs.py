"""The reference tables of the documentation are complete and true."""

import inspect
import json
import re
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from sidings import Service
from sidings.executor import Executor, ExecutorSettings, PostgresSettings
from sidings.jobs import Job, Registry
from sidings.jobs.periodic import schedule_of
from sidings.kafka import Decoder, KafkaSettings, OutboxSettings
from sidings.kafka.metrics import ConsumerMetrics
from sidings.kafka.outbox.metrics import OutboxMetrics

from .guide import block

ROOT = Path(__file__).parent.parent


# Prometheus is away for twelve minutes; then the instance, for two hours, and has counted before it is asked again.
GAPS = """
rule_files: [alerts.yml]
tests:
  - interval: 1m
    input_series:
      - {series: 'sidings_start_time_seconds{service="s",job="j"}', values: '0x600 _x12 0x200'}
      - {series: 'sidings_consumer_missed_total{service="s",topic="t",job="j"}', values: '7x600 _x12 7x200'}
      - {series: 'sidings_lost_total{service="s",job="j"}', values: '7x600 _x12 7x200'}
    alert_rule_test:
      - {eval_time: 670m, alertname: SidingsConsumerMissedMessages, exp_alerts: []}
      - {eval_time: 625m, alertname: SidingsExecutorDied, exp_alerts: []}
  - interval: 1m
    input_series:
      - {series: 'sidings_start_time_seconds{service="s",job="j"}', values: '0x600 _x120 43260x200'}
      - {series: 'sidings_consumer_missed_total{service="s",topic="t",job="j"}', values: '7x600 _x120 7x200'}
    alert_rule_test:
      - eval_time: 725m
        alertname: SidingsConsumerMissedMessages
        exp_alerts:
          - exp_labels: {service: s, topic: t, severity: critical}
            exp_annotations: {summary: "s: messages of t were deleted by retention before they were read"}
"""


# All instances end for good, one of another service for three minutes.
GONE = """
rule_files: [alerts.yml]
tests:
  - interval: 1m
    input_series:
      - {series: 'sidings_problems{service="s",instance="a"}', values: '0x60'}
      - {series: 'sidings_problems{service="s",instance="b"}', values: '0x90'}
      - {series: 'sidings_problems{service="t",instance="c"}', values: '0x90 _x3 0x60'}
    alert_rule_test:
      - {eval_time: 80m, alertname: SidingsServiceIsGone, exp_alerts: []}
      - {eval_time: 94m, alertname: SidingsServiceIsGone, exp_alerts: []}
      - eval_time: 110m
        alertname: SidingsServiceIsGone
        exp_alerts:
          - exp_labels: {service: s, severity: critical}
            exp_annotations:
              summary: "s: no instance tells anything any more"
              description: "All have ended, or Prometheus does not reach them.\\
                \\ It lasts for a day where a service was taken out or renamed."
      - {eval_time: 1600m, alertname: SidingsServiceIsGone, exp_alerts: []}
"""


# A new instance loads for three minutes, and reads a bad record whose row a later one mends. Then it catches up, and
# reads no further from the eighth minute on. Topic u always has an open transaction of five messages. Topic v is made
# anew, and its handler raises twice; an hour and a half later the instance is started anew.
LOADING = """
rule_files: [alerts.yml]
tests:
  - interval: 1m
    input_series:
      - {series: 'sidings_directory_ready{service="s",topic="t",instance="a"}', values: 0x2 1x60}
      - {series: 'sidings_directory_end_offset{service="s",topic="t",instance="a",partition="0"}', values: 9x7 10+1x60}
      - {series: 'sidings_directory_offset{service="s",topic="t",instance="a",partition="0"}', values: 0x2 5x2 9x60}
      - {series: 'sidings_directory_ready{service="s",topic="u",instance="a"}', values: 1x60}
      - {series: 'sidings_directory_end_offset{service="s",topic="u",instance="a",partition="0"}', values: 5+5x60}
      - {series: 'sidings_directory_offset{service="s",topic="u",instance="a",partition="0"}', values: 0+5x60}
      - {series: 'sidings_directory_lag{service="s",topic="u",instance="a",partition="0"}', values: 5x60}
      - {series: 'sidings_directory_ready{service="s",topic="v",instance="a"}', values: 1x60}
      - {series: 'sidings_directory_end_offset{service="s",topic="v",instance="a",partition="0"}', values: 900x10 1x50}
      - {series: 'sidings_directory_offset{service="s",topic="v",instance="a",partition="0"}', values: 900x10 1x50}
      - {series: 'sidings_directory_errors{service="s",topic="t",instance="a"}', values: 1x2 0x7 1x60}
      - series: 'sidings_directory_callback_failures_total{service="s",topic="v",instance="a"}'
        values: 0x9 2x90 0x20
    alert_rule_test:
      - {eval_time: 1m, alertname: SidingsDirectoryLags, exp_alerts: []}
      - {eval_time: 1m, alertname: SidingsDirectoryRowsAreBad, exp_alerts: []}
      - {eval_time: 5m, alertname: SidingsDirectoryLags, exp_alerts: []}
      - {eval_time: 21m, alertname: SidingsDirectoryLags, exp_alerts: []}
      - eval_time: 24m
        alertname: SidingsDirectoryLags
        exp_alerts:
          - exp_labels: {service: s, topic: t, instance: a, severity: warning}
            exp_annotations: {summary: "s on a: the directory t is behind its topic"}
      - eval_time: 12m
        alertname: SidingsDirectoryRowsAreBad
        exp_alerts:
          - exp_labels: {service: s, topic: t, severity: warning}
            exp_annotations:
              summary: "s: 1 rows of t could not be applied, their former values are in force"
              description: "`directory.errors()` and the log have keys and reasons."
      - {eval_time: 9m, alertname: SidingsDirectoryHandlerRaised, exp_alerts: []}
      - eval_time: 95m
        alertname: SidingsDirectoryHandlerRaised
        exp_alerts:
          - exp_labels: {service: s, topic: v, instance: a, severity: warning}
            exp_annotations:
              summary: "s on a: on_change of the directory v has raised 2 times, and what it keeps lacks these changes"
              description: "The log has the errors. Mend the cause, and start the instance anew."
      - {eval_time: 105m, alertname: SidingsDirectoryHandlerRaised, exp_alerts: []}
"""


# Instance a ends when its directory has loaded for five minutes, and is started five minutes later, again and again.
# Instance b is taken away while it loads. Instance c is started anew with three releases.
ENDING = """
rule_files: [alerts.yml]
tests:
  - interval: 1m
    input_series:
      - series: sidings_start_time_seconds{service="s",job="j",instance="a"}
        values: 0x5 stale _x3 600x5 stale _x3 1200x5 stale _x3 1800x5 stale _x3 2400x5
      - series: sidings_problems{service="s",job="j",instance="a"}
        values: 0x5 stale _x3 0x5 stale _x3 0x5 stale _x3 0x5 stale _x3 0x5
      - series: sidings_directory_ready{service="s",topic="t",job="j",instance="a"}
        values: 0x5 stale _x3 0x5 stale _x3 0x5 stale _x3 0x5 stale _x3 0x5
      - {series: 'sidings_problems{service="s",job="j",instance="b"}', values: 0x5 stale}
      - {series: 'sidings_directory_ready{service="s",topic="t",job="j",instance="b"}', values: 0x5 stale}
      - series: sidings_start_time_seconds{service="s",job="j",instance="c"}
        values: 0x10 660x10 1320x10 1980x20
      - {series: 'sidings_problems{service="s",job="j",instance="c"}', values: 0x50}
      - {series: 'sidings_directory_ready{service="s",topic="t",job="j",instance="c"}', values: 1x10 0 1x9 0 1x9 0 1x20}
    alert_rule_test:
      - {eval_time: 12m, alertname: SidingsDirectoryIsNotReady, exp_alerts: []}
      - eval_time: 14m
        alertname: SidingsDirectoryIsNotReady
        exp_alerts: &waits
          - exp_labels: {service: s, topic: t, instance: a, severity: critical}
            exp_annotations: {summary: "s on a waits for its directory t"}
      - {eval_time: 19m, alertname: SidingsDirectoryIsNotReady, exp_alerts: *waits}
      - {eval_time: 45m, alertname: SidingsDirectoryIsNotReady, exp_alerts: *waits}
      - {eval_time: 39m, alertname: SidingsServiceRestarts, exp_alerts: []}
      - eval_time: 48m
        alertname: SidingsServiceRestarts
        exp_alerts:
          - exp_labels: {service: s, instance: a, severity: critical}
            exp_annotations:
              summary: "s on a was started 4 times anew within an hour"
              description: "The last lines of its log say why it ended: a directory that cannot be loaded, an offset\\
                \\ that Kafka does not know. Nothing there: see whether it was killed, as for its memory."
"""


# No job of one type succeeds until, after two hours, its provider takes the key again; of another type some fail.
FAILING = """
rule_files: [alerts.yml]
tests:
  - interval: 5m
    input_series:
      - {series: 'sidings_jobs_total{service="s",type="pay",outcome="retried",instance="a"}', values: 0x4 1+1x20 21x20}
      - {series: 'sidings_jobs_total{service="s",type="pay",outcome="succeeded",instance="a"}', values: 7x24 8+1x20}
      - {series: 'sidings_jobs_total{service="s",type="eta",outcome="retried",instance="a"}', values: 0+1x45}
      - {series: 'sidings_jobs_total{service="s",type="eta",outcome="succeeded",instance="b"}', values: 0+1x45}
    alert_rule_test:
      - {eval_time: 40m, alertname: SidingsJobsFail, exp_alerts: []}
      - eval_time: 60m
        alertname: SidingsJobsFail
        exp_alerts:
          - exp_labels: {service: s, type: pay, severity: warning}
            exp_annotations:
              summary: "s: jobs of type pay are tried again and again, and none succeeds"
              description: "`sidings jobs list --type pay` and the log have the errors. They go on by themselves when\\
                \\ that is mended."
      - {eval_time: 180m, alertname: SidingsJobsFail, exp_alerts: []}
"""


# Of one type all jobs fail, once an hour; of another the waits grow to as much, until they succeed after eight hours.
# One job of a third type fails once, and is then taken away. The jobs of a fourth are put off, once an hour.
RARELY = """
rule_files: [alerts.yml]
tests:
  - interval: 1m
    input_series:
      - {series: 'sidings_jobs_total{service="s",type="pay",outcome="retried"}', values: HOURLY}
      - {series: 'sidings_jobs_total{service="s",type="pay",outcome="succeeded"}', values: 7x600}
      - series: 'sidings_jobs_total{service="s",type="book",outcome="retried"}'
        values: 0x9 1 2x1 3x3 4x7 5x15 6x31 7x59 8x59 9x59 10x59 11x59 12x59 13x166
      - {series: 'sidings_jobs_total{service="s",type="book",outcome="succeeded"}', values: 7x479 8x119}
      - {series: 'sidings_jobs_total{service="s",type="eta",outcome="retried"}', values: 0x60 1x540}
      - {series: 'sidings_jobs_total{service="s",type="ask",outcome="snoozed"}', values: HOURLY}
    promql_expr_test:
      - {expr: FAILING, eval_time: 50m, exp_samples: [{labels: '{type="book"}', value: 1}]}
      - {expr: FAILING, eval_time: 132m, exp_samples: [{labels: '{type="book"}', value: 1}]}
      - expr: FAILING
        eval_time: 420m
        exp_samples: [{labels: '{type="book"}', value: 1}, {labels: '{type="pay"}', value: 1}]
      - {expr: FAILING, eval_time: 590m, exp_samples: [{labels: '{type="pay"}', value: 1}]}
      - {expr: PUT_OFF, eval_time: 150m}
      - {expr: PUT_OFF, eval_time: 420m, exp_samples: [{labels: '{type="ask"}', value: 1}]}
"""
RARELY = RARELY.replace("HOURLY", " ".join(f"{hour}x59" for hour in range(10)))
for name, rule in (("FAILING", "SidingsJobsFail"), ("PUT_OFF", "SidingsJobsArePutOff")):
    RARELY = RARELY.replace(name, f"""'sum by (type) (ALERTS{{alertname="{rule}",alertstate="firing"}})'""")


# All jobs of one type are put off for five hours; one that polls has a success now and then; an instance that stops
# puts off some of a third.
PUT_OFF = """
rule_files: [alerts.yml]
tests:
  - interval: 10m
    input_series:
      - {series: 'sidings_jobs_total{service="s",type="pay",outcome="snoozed",instance="a"}', values: 0+1x60}
      - {series: 'sidings_jobs_total{service="s",type="pay",outcome="succeeded",instance="a"}', values: 7x30 8x30}
      - {series: 'sidings_jobs_total{service="s",type="poll",outcome="snoozed",instance="a"}', values: 0+1x60}
      - {series: 'sidings_jobs_total{service="s",type="poll",outcome="succeeded",instance="b"}', values: 0 1x29 2x30}
      - {series: 'sidings_jobs_total{service="s",type="eta",outcome="snoozed",instance="a"}', values: 0x5 9x55}
      - {series: 'sidings_jobs_total{service="s",type="eta",outcome="succeeded",instance="a"}', values: 0x60}
    alert_rule_test:
      - {eval_time: 50m, alertname: SidingsJobsArePutOff, exp_alerts: []}
      - eval_time: 120m
        alertname: SidingsJobsArePutOff
        exp_alerts:
          - exp_labels: {service: s, type: pay, severity: warning}
            exp_annotations:
              summary: "s: jobs of type pay are put off again and again, and none succeeds"
              description: "`sidings jobs show` of one of `sidings jobs list --type pay` has the reason of each\\
                \\ attempt, and so has the log: their handler asks for it (Snooze), a message's type has no handler,\\
                \\ or Postgres does not answer or refuses them. They go on by themselves when that is mended."
      - {eval_time: 360m, alertname: SidingsJobsArePutOff, exp_alerts: []}
      - {eval_time: 600m, alertname: SidingsJobsArePutOff, exp_alerts: []}
"""


# One instance is unwell for four minutes of five, another for two; a third for four at its start, a fourth for an hour.
UNWELL = """
rule_files: [alerts.yml]
tests:
  - interval: 1m
    input_series:
      - {series: 'sidings_problems{service="s",instance="a"}', values: FOUR}
      - {series: 'sidings_problems{service="s",instance="b"}', values: TWO}
      - {series: 'sidings_problems{service="s",instance="c"}', values: 1x3 0x90}
      - {series: 'sidings_problems{service="s",instance="d"}', values: 0x9 3x59 0x30}
      - {series: 'sidings_problems{service="s",instance="e"}', values: 3x13 stale}
    promql_expr_test:
      - {expr: TOLD, eval_time: 12m, exp_samples: [{labels: '{instance="e"}', value: 1}]}
      - {expr: TOLD, eval_time: 14m}
      - expr: TOLD
        eval_time: 60m
        exp_samples: [{labels: '{instance="a"}', value: 1}, {labels: '{instance="d"}', value: 1}]
      - {expr: TOLD, eval_time: 80m, exp_samples: [{labels: '{instance="a"}', value: 1}]}
"""
UNWELL = UNWELL.replace("FOUR", "1x3 0 " * 18).replace("TWO", "1x1 0x2 " * 18)
UNWELL = UNWELL.replace("TOLD", """'sum by (instance) (ALERTS{alertname="SidingsIsNotWell",alertstate="firing"})'""")


# The event loop of one instance is blocked for two seconds of each minute, that of another once, for eight.
STALLING = """
rule_files: [alerts.yml]
tests:
  - interval: 1m
    input_series:
      - {series: 'sidings_event_loop_stalled_seconds_total{service="s",instance="a"}', values: 0x10 2+2x50}
      - {series: 'sidings_event_loop_stalled_seconds_total{service="s",instance="b"}', values: 0x10 8x50}
    alert_rule_test:
      - {eval_time: 14m, alertname: SidingsEventLoopStalls, exp_alerts: []}
      - eval_time: 40m
        alertname: SidingsEventLoopStalls
        exp_alerts:
          - exp_labels: {service: s, instance: a, severity: warning}
            exp_annotations:
              summary: "s: the event loop of a was blocked for 20s of ten minutes"
              description: "Nothing of the service goes on meanwhile, and after `stall_seconds` in one go others take\\
                \\ its origins. The log has the stacks that blocked it: blocking code belongs into plain `def`\\
                \\ handlers, or `asyncio.to_thread`."
"""


def rows(text: str) -> list[list[str]]:
    """Cells of all table rows whose first cell is code."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    ]


def test_the_metrics_table_lists_what_an_executor_exports() -> None:
    registry = CollectorRegistry()
    postgres = PostgresSettings(dsn="postgresql://localhost/nowhere")
    Executor("docs", Registry(), postgres, prometheus=registry)
    exported = {f"{m.name}_total" if m.type == "counter" else m.name: m.type for m in registry.collect()}
    documented = {row[0].strip("`"): row[1] for row in rows((ROOT / "docs/metrics.md").read_text())}
    assert documented == exported


def test_the_guide_to_security_names_each_advisory_lock() -> None:
    """Any role that may connect can hold them."""
    guide, names = (ROOT / "docs/security.md").read_text(), set[str]()
    folders = ("cli", "executor", "jobs", "kafka", "schema", "service", "spark_analytics")
    for file in (file for folder in folders for file in (ROOT / folder).rglob("*.*") if file.suffix in (".sql", ".py")):
        text = file.read_text()
        for call in re.findall(r"pg_(?:try_)?advisory_(?:xact_)?lock(?:_shared)?\((.*)", text):
            if found := re.match(r"hashtextextended\('(sidings\.\w+)', ", call):
                names.add(found[1])
            else:  # given beside the statement
                assert call.startswith("hashtextextended($1, 0)")
                [name] = re.findall(r'f"(sidings\.\w+:)\{schema\}"', text)
                names.add(name)
    assert len(names) == 6
    assert [name for name in sorted(names) if f"`hashtextextended('{name}" not in guide] == []


@pytest.mark.parametrize("file", ["alerts.yml", "dashboard.json"])
def test_alerts_and_dashboard_ask_for_metrics_and_commands_that_exist(file: str) -> None:
    text, tables = (ROOT / "docs" / file).read_text(), "".join(p.read_text() for p in (ROOT / "docs").glob("*.md"))
    asked = {name.removesuffix("_bucket") for name in re.findall(r"sidings_\w+[a-z]", text)}
    assert len(asked) > 15
    assert asked <= {row[0].strip("`") for row in rows(tables)}
    commands = {f"`{name}" for name in re.findall(r"`(sidings [a-z]+ [a-z]+)", text)}
    assert commands
    assert [name for name in commands if name not in (ROOT / "docs/cli.md").read_text()] == []


def test_every_panel_of_the_dashboard_has_a_place_of_its_own() -> None:
    panels = json.loads((ROOT / "docs/dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_the_dashboard_shows_all_that_alerts_ask_for() -> None:
    """It had neither a history that nobody archives, nor topics of the outbox that cannot be sent to, nor directories
    that are read anew: who came from an alert of these found nothing there."""
    alerts, dashboard = ((ROOT / "docs" / file).read_text() for file in ("alerts.yml", "dashboard.json"))
    asked = set(re.findall(r"sidings_\w+[a-z]", alerts))
    assert len(asked) > 15
    assert asked <= set(re.findall(r"sidings_\w+[a-z]", dashboard))


def test_the_alert_on_jobs_that_wait_names_too_few_workers_and_pauses() -> None:
    """Nothing else that it sent people to shows these: no head fails, nothing runs for long, executors are alive."""
    alert = (ROOT / "docs/alerts.yml").read_text().partition("alert: SidingsJobWaits")[2].partition("- alert:")[0]
    assert "`sidings_ready`" in alert
    assert "`sidings pauses`" in alert


def test_the_alert_on_lag_names_pauses() -> None:
    """Nothing is wrong then, so that /health, the log's errors and the other metrics of the topic have nothing."""
    alert = (ROOT / "docs/alerts.yml").read_text().partition("alert: SidingsConsumerLags")[2].partition("- alert:")[0]
    assert "`sidings pauses`" in alert


def test_counters_that_alerts_ask_for_are_there_before_anything_is_counted() -> None:
    """`increase()` does not see the first count of a series that begins with it."""
    registry, jobs = CollectorRegistry(), Registry()

    @jobs.job()
    async def ride(job: Job[str]) -> None: ...

    Executor("docs", jobs, PostgresSettings(dsn="postgresql://localhost/nowhere"), prometheus=registry)
    ConsumerMetrics("docs", registry, ["transports"])
    outbox = OutboxMetrics("docs", registry)
    outbox.batch("etas", 1)
    of = {"service": "docs"}
    counters = [
        ("sidings_jobs_total", of | {"type": "ride", "outcome": "discarded"}),
        ("sidings_jobs_total", of | {"type": "ride", "outcome": "held"}),
        ("sidings_lost_total", of),
        ("sidings_audit_found_total", of),
        ("sidings_database_errors_total", of),
        ("sidings_event_loop_stalled_seconds_total", of),
        ("sidings_consumer_missed_total", of | {"topic": "transports"}),
        ("sidings_consumer_messages_total", of | {"topic": "transports", "result": "parked"}),
        ("sidings_consumer_messages_total", of | {"topic": "transports", "result": "dead_letter"}),
        ("sidings_outbox_parked_total", of | {"topic": "etas"}),
    ]
    assert [registry.get_sample_value(name, labels) for name, labels in counters] == [0] * len(counters)


def test_alerts_see_what_is_counted_before_the_first_scrape() -> None:
    """As a consumer does that misses messages while it starts: the series begins with them."""
    rules = (ROOT / "docs/alerts.yml").read_text().split("- alert: ")
    again_and_again = "SidingsJobsFail", "SidingsJobsArePutOff", "SidingsEventLoopStalls"
    alerts = "".join(rule for rule in rules if not rule.startswith(again_and_again))
    counted = re.findall(r"sum by (\(.+\)) \(increase\((\w+)(\{.+\})?\[(\w+)\]\)\) > 0\n", alerts)
    assert len(counted) == alerts.count("increase(sidings_") >= 7
    for by, name, labels, time in counted:
        assert f"or sum by {by} (({name}{labels} > 0) unless {name} offset {time}\n" in alerts


def test_alerts_of_what_was_counted_take_a_gap_in_prometheus_for_no_new_series() -> None:
    """An hour after each restart of Prometheus that had taken minutes came a critical one, of what was once counted."""
    alerts = (ROOT / "docs/alerts.yml").read_text()
    for name, time in re.findall(r"unless (\w+) offset (\w+)", alerts):
        seconds = {"10m": 600, "15m": 900, "1h": 3600}[time]
        young = f"and on (service, job, instance) time() - sidings_start_time_seconds > {seconds}"
        assert f"unless (max_over_time({name}[1d] offset {time}) {young}))\n" in alerts


def test_an_alert_sees_that_no_instance_is_left() -> None:
    """The others ask for what instances tell: of a service that had ended altogether, none of them came."""
    alerts = (ROOT / "docs/alerts.yml").read_text()
    last = "group by (service) (max_over_time(sidings_problems[1d])) unless group by (service) (sidings_problems)"
    assert f"expr: {last}\n" in alerts


def increased(outcome: str, time: str) -> str:
    """time: such as "[3h] offset 3h"."""
    return f'sum by (service, type) (increase(sidings_jobs_total{{outcome="{outcome}"}}{time})) > 0'


def test_an_alert_sees_that_no_job_of_a_type_succeeds() -> None:
    """Without a group they were in no figure that an alert asks for, and the default retries never end. Where they come
    once an hour, half an hour has none of them in it."""
    alerts = " ".join((ROOT / "docs/alerts.yml").read_text().split())
    often = f"({increased('retried', '[30m]')} unless {increased('succeeded', '[30m]')})"
    both = f"{increased('retried', '[3h]')} and {increased('retried', '[3h] offset 3h')}"
    assert f"{often} or ({both} unless {increased('succeeded', '[6h]')}) for: 30m keep_firing_for: 45m" in alerts


def test_an_alert_sees_that_jobs_of_a_type_are_only_put_off() -> None:
    """They do not fail: neither of the alerts on jobs that fail or wait came, be it for days."""
    alerts = " ".join((ROOT / "docs/alerts.yml").read_text().split())
    both = f"{increased('snoozed', '[3h]')} and {increased('snoozed', '[3h] offset 3h')}"
    assert f"({increased('snoozed', '[30m]')} or ({both})) unless {increased('succeeded', '[6h]')} for: 1h" in alerts


def test_an_alert_sees_an_instance_that_ends_again_and_again() -> None:
    """A directory could not be loaded: each life of the service was shorter than what any rule waits for."""
    alerts = (ROOT / "docs/alerts.yml").read_text()
    assert "max by (service, instance) (changes(sidings_start_time_seconds[1h])) > 3\n" in alerts
    ready = "min by (service, topic, instance) (last_over_time(sidings_directory_ready[7m])) == 0"
    assert f"expr: {ready}\n        for: 13m\n" in alerts


def test_alerts_of_directories_are_quiet_while_an_instance_loads() -> None:
    """With each that started came one of a directory that was behind, since the last ten minutes of a series that has
    just begun are its first sample, and one of bad rows that later records had mended. That of a directory that was
    behind never ended where a producer always has a transaction open."""
    alerts = (ROOT / "docs/alerts.yml").read_text()
    assert "(sidings_directory_errors and sidings_directory_ready == 1) > 0\n" in alerts
    lags = "min_over_time(sidings_directory_end_offset[10m]) - sidings_directory_offset"
    assert f"{lags} and ignoring (partition) sidings_directory_ready == 1) > 0\n        for: 5m\n" in alerts


def test_there_is_a_rule_for_all_that_the_guide_to_directories_says_to_alert_on() -> None:
    guide, alerts = ((ROOT / "docs" / file).read_text() for file in ("directories.md", "alerts.yml"))
    listed = guide.partition("\nAlert on:\n")[2].partition("\n#")[0]
    said = re.findall(r"alert on\s+`(sidings_\w+)", guide)
    assert said
    asked = {*said, *re.findall(r"sidings_directory_\w+", listed)}
    assert len(asked) > 5
    assert [name for name in asked if name not in listed or name not in alerts] == []


@pytest.mark.parametrize("tests", [GAPS, GONE, FAILING, RARELY, PUT_OFF, ENDING, LOADING, UNWELL, STALLING])
def test_the_rules_tell_what_they_are_to_tell_and_no_more(tests: str, tmp_path: Path) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("Prometheus' promtool is not installed")
    shutil.copy(ROOT / "docs/alerts.yml", tmp_path / "alerts.yml")
    (tmp_path / "test.yml").write_text(tests)
    subprocess.run([promtool, "test", "rules", tmp_path / "test.yml"], check=True)


def test_the_archives_crontab_is_in_time_in_every_zone() -> None:
    """Two hours east of Greenwich it ran when the day had been over for ten minutes only: each night came the alert."""
    *times, command = block("history.md", "The archive", "sh").splitlines()[-1].split(maxsplit=5)
    assert command.startswith("python -m sidings.spark_analytics.history archive ")
    over = datetime(2026, 3, 3, tzinfo=UTC)
    for hours in range(-14, 13):
        schedule = schedule_of(" ".join(times), None, f"Etc/GMT{hours:+}")
        first = schedule.after(over + timedelta(hours=1))
        assert first < schedule.after(first) < over + timedelta(days=1), "also what comes late is archived within a day"


@pytest.mark.parametrize("model", [PostgresSettings, ExecutorSettings, KafkaSettings, OutboxSettings])
def test_the_configuration_reference_lists_every_field(model: type[BaseModel]) -> None:
    assert configured(rf"`{model.__name__}`") == set(model.model_fields)


def test_the_configuration_reference_lists_every_argument_of_the_service() -> None:
    assert configured(r"`Service\(name, …\)`") == set(inspect.signature(Service).parameters)


def configured(title: str) -> set[str]:
    """The settings that a section of the reference names."""
    text = (ROOT / "docs/configuration.md").read_text()
    section = re.search(rf"## {title}.*?(?=\n## |\Z)", text, re.DOTALL)
    assert section is not None
    return {name for row in rows(section[0]) for name in re.findall(r"`(\w+)`", row[0])}


@pytest.mark.parametrize("page", ["consumer.md", "directories.md"])
def test_a_decoder_is_given_what_its_page_says(page: str) -> None:
    """As they had it, type checkers refused it, and it failed at a tombstone."""
    documented = re.search(r"`decoder\(message: (.+?)\)", (ROOT / "docs" / page).read_text())
    assert documented is not None
    [[taken], _] = get_args(Decoder)
    assert str(taken).rpartition(".")[2] == documented[1].replace("\\", "")


def anchors(page: Path) -> set[str]:
    """Those of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_link_inside_the_documentation_leads_somewhere() -> None:
    pages = [
        page
        for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
        for page in ROOT.glob(pattern)
    ]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    inside = [(page, *link.partition("#")[::2]) for page, link in links if not link.startswith("https:")]
    broken = [
        f"{page.relative_to(ROOT)}: {path}#{anchor}"
        for page, path, anchor in inside
        for target in [page.parent / path if path else page]
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]
    assert len(inside) > 100
    assert broken == []
