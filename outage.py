"""What a loop tells the log of a server that is away: when it goes, now and then while it is away, when it is back."""

import logging
import time

from .legible import told

__all__ = ["Outage"]

_FIRST_PAUSE_SECONDS = 10.0  # from the first line to the second; each pause is twice as long as the one before
_LONGEST_PAUSE_SECONDS = 600.0


class Outage:
    """Something that fails again and again for one reason. Tries that fail in between are told at level DEBUG.

    what: the end of "... could not be ...", for example "the outbox could not be read". Any thread may ask for `error`,
    `failed_at` and `seconds`.
    """

    def __init__(self, log: logging.Logger, what: str) -> None:
        self.error: str | None = None  # of the last try; None: it has succeeded
        self.failed_at: float | None = None  # the last try that has failed, by time.monotonic()
        self._log = log
        self._what = what
        self._since: float | None = None
        self._tries = 0
        self._pause = self._next = 0.0

    def failed(self, error: object) -> None:
        """One more try has failed."""
        now = time.monotonic()
        self._tries += 1
        self.error, self.failed_at = told(error), now
        if self._since is None:
            self._since, self._pause = now, _FIRST_PAUSE_SECONDS
            self._log.warning("%s, trying again: %s", self._what, self.error)
        elif now < self._next:
            self._log.debug("%s, trying again: %s", self._what, self.error)
            return
        else:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
            self._log.warning(
                "%s for %.0f s now (%s tries), trying again: %s", self._what, now - self._since, self._tries, self.error
            )
        self._next = now + self._pause

    def seconds(self) -> float:
        """How long it has been failing; 0 where the last try has succeeded."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def over(self) -> None:
        """A try has succeeded."""
        if self._since is not None:
            self._log.warning("%s for %.1f s, and works again", self._what, time.monotonic() - self._since)
            self._since, self._tries, self.error = None, 0, None
