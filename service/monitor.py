"""Metrics and health over HTTP, from a thread of its own, so that it answers although the event loop hangs."""

import errno
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from weakref import WeakSet

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..errors import ConfigurationError
from ..exposition import gauge, show, show_no_more

__all__ = ["Monitor", "ProblemMetrics", "address_of", "warn_of_multiprocess_mode"]

Problems = Callable[[], list[str]]

# At once. The oldest makes room for a newer one: it is one that does not end its request. Each keeps a thread and a
# file, and the process needs some to connect anew.
_MOST_CONNECTIONS = 32
_PAUSE_SECONDS = 0.1  # after a connection that could not be accepted
_MULTIPROCESS = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")  # prometheus_client still takes the old one

log = logging.getLogger("sidings")

_listening: WeakSet[ThreadingHTTPServer] = WeakSet()


def _close_in_child() -> None:
    """A forked process that outlives a killed service, as those of a `ProcessPoolExecutor` do, would keep the address
    from the next one."""
    for server in list(_listening):
        server.socket.close()


os.register_at_fork(after_in_child=_close_in_child)


def address_of(http: str | int) -> tuple[str, int]:
    """Host and port of ``"host:port"``, ``":port"`` or a port; without a host: all addresses of IPv4, and with ``[::]``
    those of IPv6 as well.

    Raises `ConfigurationError`.
    """
    host, colon, port = str(http).rpartition(":")
    if not port.isdigit() or int(port) > 65_535 or (colon and not host and not str(http).startswith(":")):
        raise ConfigurationError(f"http={http!r}: give 'host:port' or a port, 0 for a free one")
    return host.strip("[]") or "0.0.0.0", int(port)


def warn_of_multiprocess_mode() -> None:
    """Where the metrics are served elsewhere, and put together by prometheus_client for several processes: from files,
    which have what is counted in its own classes alone, and nothing that is made when somebody asks."""
    if variable := next(filter(os.environ.__contains__, _MULTIPROCESS), None):
        log.warning(
            "%s is set, and http= is not: the multiprocess mode of prometheus_client shows no gauge of Sidings, so "
            "most alerts never come; give each process an http= of its own (docs/metrics.md)",
            variable,
        )


class ProblemMetrics(Collector):
    """Of how much ``/health`` complains, for rules: much of that shows in no other metric, as a consumer without Kafka.
    And since when the service has run. In the registry until `close`."""

    def __init__(self, service: str, registry: CollectorRegistry, problems: Problems) -> None:
        self._service = service
        self._registry = registry
        self._problems = problems
        self._started = time.time()
        show(self, registry)

    def close(self) -> None:
        """Leave the registry."""
        show_no_more(self, self._registry)

    def collect(self) -> Iterator[Metric]:
        """The metrics, as prometheus-client wants them."""
        service = (self._service,)
        problems = float(len(self._problems()))
        yield gauge("sidings_problems", "What /health complains about.", ["service"], {service: problems})
        started = "When the service was started, in seconds since 1970."
        yield gauge("sidings_start_time_seconds", started, ["service"], {service: self._started})


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # a client that says nothing does not keep its thread

    def do_GET(self) -> None:
        self.wfile.write(self._begin())

    def do_HEAD(self) -> None:  # as some probes ask
        self._begin()

    def _begin(self) -> bytes:
        assert isinstance(self.server, _Server)
        status, content_type, body = self.server.answer(self.path.partition("?")[0])
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return body

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: probes come every few seconds."""


class _Server(ThreadingHTTPServer):
    """answer: called with a path, in a thread; gives status, content type and body."""

    daemon_threads = True

    def __init__(self, wanted: tuple[str, int], answer: Callable[[str], tuple[int, str, bytes]]) -> None:
        self.address_family = socket.AF_INET6 if ":" in wanted[0] else socket.AF_INET
        self.server_name = wanted[0]
        self.answer = answer
        self._open: dict[socket.socket, None] = {}  # oldest first
        self._turn = threading.Lock()
        super().__init__(wanted, _Handler)

    def server_bind(self) -> None:  # HTTPServer's asks DNS for the host's name, and the event loop would wait
        TCPServer.server_bind(self)
        self.server_port = self.server_address[1]

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:  # as where no file is left: who asks keeps waiting, and would be accepted again at once
            time.sleep(_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._turn:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > _MOST_CONNECTIONS else None
            if oldest is not None:
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread notices, and closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._turn:  # before it is closed: its number may be another one's then
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # the client has hung up
            log.exception("a request from %s failed", client_address)


class Monitor:
    """Serves ``/metrics`` (Prometheus' text), ``/health`` and ``/ready``: 200 with ``{"status": "ok"}``, or 503 with
    the list of problems. The functions are called from the server's threads."""

    def __init__(
        self, http: str | int, registry: CollectorRegistry, *, problems: Problems, not_ready: Problems
    ) -> None:
        self._http = http
        self._wanted = address_of(http)
        self._registry = registry
        self._pages = {"/health": problems, "/ready": not_ready}
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> tuple[str, int] | None:
        """Where it listens, once started."""
        return None if self._server is None else (str(self._server.server_address[0]), self._server.server_port)

    def start(self) -> None:
        """Listen. Raises `ConfigurationError` if the address cannot be used."""
        try:
            self._server = _Server(self._wanted, self._answer)
        except OSError as error:
            taken = ": another worker may have it, or the web server itself; give each a port of its own"
            why = f"{error}{taken if error.errno == errno.EADDRINUSE else ''}"
            raise ConfigurationError(f"http={self._http!r}: cannot listen there: {why}") from error
        _listening.add(self._server)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="sidings http", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop listening."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=1.0)
            self._server = self._thread = None

    def _answer(self, path: str) -> tuple[int, str, bytes]:
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        page = self._pages.get(path)
        if page is None:
            return 404, "text/plain", b"/metrics, /health, /ready\n"
        problems = page()
        text = {"status": "problems", "problems": problems} if problems else {"status": "ok"}
        return (503 if problems else 200), "application/json", json.dumps(text).encode()
