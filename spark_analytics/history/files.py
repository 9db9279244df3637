"""The layout of the archive: ``DIR/sidings-history.json`` and ``DIR/day=2026-03-01/part-1.parquet``."""

import json
import re
import secrets
from datetime import date
from pathlib import Path

from ...errors import ConfigurationError

__all__ = ["archived_parts", "check_archive", "claim_archive", "part_file"]

_MARK = "sidings-history.json"


def check_archive(directory: Path) -> str:
    """The name of the service whose archive it is. Raises `ConfigurationError` where it is none."""
    mark = directory / _MARK
    if not mark.exists():
        raise ConfigurationError(f"{directory} is no archive of a history: it has no {_MARK}")
    try:
        return str(json.loads(mark.read_text(encoding="utf-8"))["service"])
    except (ValueError, KeyError, TypeError):
        raise ConfigurationError(f'{mark} is damaged: it should read {{"service": "...", "format": 1}}') from None


def claim_archive(directory: Path, service: str, *, entered: bool) -> None:
    """Make `directory` the archive of `service`. entered: the database has entries of days that are archived there.

    Raises `ConfigurationError` where it is another's or holds other things, or has lost what was entered."""
    mark, text = directory / _MARK, json.dumps({"service": service, "format": 1})
    if entered and not mark.exists():
        raise ConfigurationError(
            f"this database has archived days in {directory}, and {_MARK} is not there: is it mounted? If all of it is "
            f"lost, write {text} into {mark}: what Postgres still has is then archived again"
        )
    directory.mkdir(parents=True, exist_ok=True)
    if not mark.exists():
        if any(not path.name.startswith(f".{_MARK}") for path in directory.iterdir()):
            raise ConfigurationError(f"{directory} holds other things than an archive: give an empty directory")
        draft = directory / f".{_MARK}-{secrets.token_hex(8)}"
        try:
            draft.write_text(f"{text}\n", encoding="utf-8")
            draft.replace(mark)
        finally:
            draft.unlink(missing_ok=True)
    if (owner := check_archive(directory)) != service:
        raise ConfigurationError(
            f"{directory} is the archive of the service {owner!r}, not of {service!r}: give another"
        )


def archived_parts(directory: Path) -> dict[tuple[date, int], Path]:
    """The files that it has, by day and part, in order. Raises `ConfigurationError` for a day that is none."""
    found: dict[tuple[date, int], Path] = {}
    for path in directory.glob("day=*/part-*.parquet"):
        if match := re.fullmatch(r"day=(\d{4}-\d\d-\d\d)/part-(\d+)\.parquet", path.relative_to(directory).as_posix()):
            try:
                day = date.fromisoformat(match[1])
            except ValueError as error:
                raise ConfigurationError(f"{path} is of no day ({error}): take its folder out of the archive") from None
            found[day, int(match[2])] = path
    return dict(sorted(found.items()))


def part_file(directory: Path, day: date, part: int) -> Path:
    """Where the rows are of the `part`-th partition that the day has had."""
    return directory / f"day={day.isoformat()}" / f"part-{part}.parquet"
