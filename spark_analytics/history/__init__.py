"""Job histories, analysed on Spark.

`reading` gives the attempts of a `Selection` as one table, out of Postgres, the archive, or both; `analyse` writes all
answers as Parquet tables, `report` makes a page of them. ``python -m sidings.spark_analytics.history`` does all three.
`archive` copies the days of a history that are over to Parquet.

Reading order: `selection`, `reading`; the answers: `volume`, `durations`, `blocked`, `capacity`, `skew`, `failures`,
`compare`, and `analysis`, which gives them all; the page: `findings` (what is wrong, in sentences), `plots`, `report`;
the archive: `files`, `missing` (what of them Postgres has), `archive`; what these stand on: `database`, `dsn` (for
JDBC), `order`, `running`.
"""

from .analysis import TABLES, analyse
from .archive import archive
from .reading import reading
from .report import Facts, report
from .selection import Selection

__all__ = ["TABLES", "Facts", "Selection", "analyse", "archive", "reading", "report"]
