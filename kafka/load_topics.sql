-- All topics whose partitions are known: a few dozen.
SELECT topic, partitions, partitioner FROM sidings.topic
