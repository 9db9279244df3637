"""The service, which puts everything together.

Reading order: `configuration` (what its author gives); `subscriptions` (who handles which topic); `parts` (what the
service consists of); `life` (how the parts start, stop and fail together) with `monitor` and `lookups` (host names);
then `service`, which is what the author sees of all this.
"""

from .service import Service

__all__ = ["Service"]
