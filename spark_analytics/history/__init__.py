"""Job histories, analysed on Spark."""
