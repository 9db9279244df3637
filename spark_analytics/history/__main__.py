"""``python -m sidings.spark_analytics.history``: an analysis, or ``… archive``: the archive."""

import argparse
import os
import secrets
import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from ...errors import ConfigurationError, SidingsError
from ..session import POSTGRES_DRIVER, session
from .analysis import analyse
from .archive import archive
from .capacity import check_instance
from .reading import check_source, reading
from .report import Facts, report
from .selection import Selection

_SETTINGS = {
    "spark.driver.memory": "3g",
    "spark.sql.shuffle.partitions": str(2 * (os.cpu_count() or 1)),
    "spark.log.level": "ERROR",
    "spark.ui.showConsoleProgress": "false",
}


_KNOWN = (
    KeyboardInterrupt, SidingsError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError, PySparkException,
    Py4JError,
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 when it is done, 1 with the reason on stderr otherwise; 130 when interrupted."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        if given[:1] == ["archive"]:
            _archive(given[1:])
        else:
            _analyse(given)
    except _KNOWN as error:
        interrupted = _interrupted(error)
        told = "interrupted, nothing is left behind" if interrupted else _told(error)
        print(f"error: {told}", file=sys.stderr)
        return 130 if interrupted else 1
    return 0


def _interrupted(error: BaseException | None) -> bool:
    """Also where Spark was: what fails then, while all is being put away, comes of that."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _told(error: BaseException) -> str:
    match error:
        case PySparkException() | Py4JError():
            return f"Spark has failed: {_cause(error)}"
        case asyncpg.InsufficientPrivilegeError():
            return f"Postgres refuses: {error}; an analysis reads the schema's tables, the archive's role must own them"
        case asyncpg.PostgresError() | asyncpg.InterfaceError() | ConnectionError() | TimeoutError():
            return f"Postgres: {str(error) or type(error).__name__}"
        case _:
            return str(error)


def _cause(error: BaseException) -> str:
    """The first line of what began it: Java tells the whole chain, a trace each."""
    causes = [line for line in str(error).splitlines() if line.startswith("Caused by: ")]
    lines = [line for line in (causes[-1:] or str(error).splitlines()) if line.strip()]
    return (lines[0] if lines else type(error).__name__).removeprefix("Caused by: ")


def _source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--postgres", metavar="DSN", help="default, where no archive is read: $SIDINGS_POSTGRES")
    schema = os.environ.get("SIDINGS_SCHEMA") or "sidings"
    parser.add_argument("--schema", default=schema, help="default: $SIDINGS_SCHEMA, else sidings")


def _analyse(given: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m sidings.spark_analytics.history",
        description="Analyse a history of jobs; `archive` archives one.",
    )
    _source(parser)
    parser.add_argument(
        "--archive", type=Path, metavar="DIR", help="its Parquet archive, for days that Postgres no longer has"
    )
    parser.add_argument(
        "--from",
        dest="since",
        type=_time,
        required=True,
        metavar="TIME",
        help="e.g. 2026-03-01T06:00Z; without a zone: UTC",
    )
    parser.add_argument(
        "--to", dest="until", type=_time, default=datetime.now(UTC), metavar="TIME", help="default: now"
    )
    parser.add_argument(
        "--compare-from", type=_time, metavar="TIME", help="an earlier window, to look for what has become worse"
    )
    parser.add_argument("--compare-to", type=_time, metavar="TIME")
    parser.add_argument(
        "--type", dest="types", action="append", default=[], help="only this type; may be given several times"
    )
    parser.add_argument("--origin", dest="origins", action="append", default=[], help="only this origin; as above")
    parser.add_argument(
        "--concurrency",
        type=int,
        default=100,
        metavar="N",
        help="of an instance, for the instances needed; default: 100",
    )
    parser.add_argument(
        "--utilisation", type=float, default=0.7, metavar="SHARE", help="how busy an instance is to be; default: 0.7"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="made; gets a Parquet table for each answer, and report.html",
    )
    chosen = parser.parse_args(given)
    if chosen.postgres is None and chosen.archive is None:
        chosen.postgres = os.environ.get("SIDINGS_POSTGRES") or None
    if (chosen.compare_from is None) != (chosen.compare_to is None):
        raise ConfigurationError("give both --compare-from and --compare-to, or neither")
    if chosen.out.exists():
        raise ConfigurationError(f"{chosen.out} exists already: give a new directory")
    check_instance(chosen.concurrency, chosen.utilisation)
    only = tuple(chosen.types), tuple(chosen.origins)
    selection = Selection(chosen.since, chosen.until, *only)
    compared = Selection(chosen.compare_from, chosen.compare_to, *only) if chosen.compare_from else None
    check_source(chosen.postgres, chosen.schema, chosen.archive)  # before Spark starts, which takes its time
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    draft = chosen.out.parent / f".{chosen.out.name}-{secrets.token_hex(4)}"
    facts = Facts(_named(chosen), selection, compared, chosen.concurrency, chosen.utilisation)
    try:
        _write(chosen, facts, draft)
        draft.rename(chosen.out)  # it is there as a whole or not at all
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    print(f"{chosen.out / 'report.html'}")


def _write(chosen: argparse.Namespace, facts: Facts, out: Path) -> None:
    with ExitStack() as stack:
        # The outermost: what Spark still writes when it is interrupted goes with the rest.
        scratch = Path(
            stack.enter_context(tempfile.TemporaryDirectory("", "sidings-history-", ignore_cleanup_errors=True))
        )
        where: dict[str, Any] = {
            "postgres": chosen.postgres,
            "schema": chosen.schema,
            "archive": chosen.archive,
            "scratch": scratch,
        }
        spark = _spark(scratch)
        stack.callback(spark.stop)
        attempts = stack.enter_context(reading(spark, facts.selection, **where))
        if attempts.isEmpty():
            raise ConfigurationError(_nothing(facts.selection))
        before = None
        if facts.compared is not None:
            earlier = stack.enter_context(reading(spark, facts.compared, **where))
            if earlier.isEmpty():
                raise ConfigurationError(_nothing(facts.compared))
            before = earlier, facts.compared
        analyse(
            attempts, facts.selection, out, before=before, instance_concurrency=facts.concurrency,
            utilisation=facts.utilisation, on_table=lambda name: print(f"wrote {name}", file=sys.stderr),
        )  # fmt: skip
    (out / "report.html").write_text(report(out, facts), encoding="utf-8")


def _spark(scratch: Path) -> SparkSession:
    local = {} if "SPARK_ENV_LOADED" in os.environ else {"spark.local.dir": str(scratch)}
    return session("sidings-history", POSTGRES_DRIVER, _SETTINGS | local)


def _nothing(selection: Selection) -> str:
    only = " of these types and origins" if selection.types or selection.origins else ""
    return (
        f"no attempt{only} ended between {selection.since:%Y-%m-%d %H:%M:%S}Z and "
        f"{selection.until:%Y-%m-%d %H:%M:%S}Z: "
        "choose another window; of days that retention has dropped, the archive may know (--archive)"
    )


def _named(chosen: argparse.Namespace) -> str:
    names: list[str] = []
    if chosen.postgres:
        parts = urlsplit(str(chosen.postgres))
        names.append(f"{parts.netloc.rpartition('@')[2]}{parts.path}, schema {chosen.schema}")
    if chosen.archive:
        names.append(f"the archive {chosen.archive}")
    return " and ".join(names)


def _archive(given: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m sidings.spark_analytics.history archive",
        description="Copy the days of a history that are over to Parquet. Safe to repeat, to kill, and "
        "to run twice at once.",
    )
    _source(parser)
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the archive; made when missing")
    chosen = parser.parse_args(given)
    dsn = chosen.postgres if chosen.postgres is not None else os.environ.get("SIDINGS_POSTGRES") or None
    if dsn is None:
        parser.error("give --postgres, the DSN of the service's database, or set SIDINGS_POSTGRES")
    try:
        archive(dsn, chosen.to, schema=chosen.schema, on_day=print)
    except OSError as error:
        if error.filename is not None or isinstance(error, ConnectionError | TimeoutError):  # those are Postgres'
            raise
        raise SidingsError(f"{chosen.to} cannot be written: {error}") from error  # a full disk is not told with a name


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write e.g. 2026-03-01 or 2026-03-01T06:00Z") from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough, and tidying up takes its time
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
