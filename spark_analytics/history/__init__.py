"""Job histories, analysed on Spark.

`reading` gives the attempts of a `Selection` as one table, out of Postgres, the archive, or both; `analyse` writes all
answers as Parquet tables, `report` makes a page of them. ``python -m sidings.spark_analytics.history`` does all three.
`archive` copies the days of a history that are over to Parquet.

To read on: `reading`; `volume`, `durations`; `blocked`; `capacity`; `skew`; `failures`; `compare`; `analysis`;
`report`; `files`, `archive`; `database`, `order`, `running`.
"""

from .analysis import TABLES, analyse
from .archive import archive
from .reading import reading
from .report import Facts, report
from .selection import Selection

__all__ = ["TABLES", "Facts", "Selection", "analyse", "archive", "reading", "report"]
