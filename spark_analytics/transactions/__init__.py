"""Change-data rows, combined into transactions on Spark Structured Streaming."""
