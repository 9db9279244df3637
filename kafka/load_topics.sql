-- All topics whose partitions are known: a few dozen.
SELECT topic, partitions, partitioner, former FROM sidings.topic
