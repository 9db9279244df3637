"""A streaming process to be killed: the command, with two threads and the devstack's jars. argv: as of the command."""

import os
import sys

from sidings.devstack import spark_jars
from sidings.spark_analytics.transactions.__main__ import main

if __name__ == "__main__":
    os.environ["SIDINGS_SPARK_JARS"] = ",".join(map(str, spark_jars()))
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYSPARK_SUBMIT_ARGS"] = "--master local[2] --driver-memory 1g pyspark-shell"
    sys.exit(main())
