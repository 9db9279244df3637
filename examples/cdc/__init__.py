"""Change-data transactions: the four tables of "Combining CDC Transactional Messages Using Kafka Streams", on Spark.

    python -m examples.cdc                  # servers, row changes, the query, a reader, and a check; about a minute

Row changes of random transactions are sent shuffled, spread over partitions, some of them twice, and one of them never.
Spark combines them; a service reads the events, each exactly once although some come twice.

Reading order: `changes` (what the database would send), `reader` (the service), `check` (what must have come),
`__main__`.
"""
