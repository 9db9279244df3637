"""Directories: live replicas of compacted topics.

Reading order: `rows` (from a record to a change), `storage` (the port) with `memory`, `progress` (the barrier),
`callbacks`, `topic` (what Kafka says of the topic), `follower` (reads it), and `directory`, which is what a service
author sees of all this.
"""

from .callbacks import Changed
from .directory import Directory
from .memory import Memory
from .rows import BadRecord, KeyOf
from .storage import Storage

__all__ = ["BadRecord", "Changed", "Directory", "KeyOf", "Memory", "Storage"]
