"""Directories: live replicas of compacted topics.

Reading order: `rows` (from a record to a change) with `reading` (how that is done, as a text), `storage` (the port)
with `memory` and `sqlite` (`columns` has its forms of rows and keys), `progress` (the barrier), `callbacks`, `faults`,
`topic` (what Kafka says of the topic), `reader` (the client), `same_log` (is the log still the one that was read),
`completeness` (may deletions have been missed), `follower` (reads, and decides where to begin), `metrics`, and
`directory`, which is what a service author sees of all this.
"""

from .callbacks import Changed
from .directory import Directory
from .memory import Memory
from .rows import BadRecord, KeyOf
from .sqlite import SQLite
from .storage import Storage

__all__ = ["BadRecord", "Changed", "Directory", "KeyOf", "Memory", "SQLite", "Storage"]
