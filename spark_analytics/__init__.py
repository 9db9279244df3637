"""What runs on Spark: `history` analyses the attempts of jobs, `transactions` combines change-data rows.

Needs ``pip install 'sidings[spark]'`` and Java 17 or newer. Both take a `SparkSession` of yours; `session` makes one.
Nothing here imports the rest of Sidings: it knows only the shapes of tables and messages.
"""

from .session import KAFKA_CONNECTOR, POSTGRES_DRIVER, session

__all__ = ["KAFKA_CONNECTOR", "POSTGRES_DRIVER", "session"]
