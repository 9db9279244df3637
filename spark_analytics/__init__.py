"""What runs on Spark: `history` analyses the attempts of jobs, `transactions` combines change-data rows.

Needs ``pip install 'sidings[spark]'`` and Java 17 or newer. Both take a `SparkSession` of yours; `session` makes one.
Of the rest of Sidings they import only `errors`, `settings` and `schema`; of jobs, histories and messages they know
the shapes alone.
"""

from .session import KAFKA_CONNECTOR, POSTGRES_DRIVER, session

__all__ = ["KAFKA_CONNECTOR", "POSTGRES_DRIVER", "session"]
