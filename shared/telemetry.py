"""Metrics and the HTTP page that shows them: /metrics, /livez, /readyz.

Metrics are prometheus_client objects over one registry a process; each half declares its own in its `metrics.py`.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from shared.errors import ConfigError

REGISTRY = CollectorRegistry()
SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not news."""


class _Server6(WSGIServer):
    address_family = socket.AF_INET6


class MetricsPage:
    """Serves the registry over HTTP from one thread. `ready` decides /readyz. Use as a context manager.

    Port 0 serves nowhere. The page is bound to the loopback unless `host` says otherwise.
    """

    def __init__(self, port: int, ready: Callable[[], bool], host: str = "127.0.0.1", name: str = "port") -> None:
        self._ready = ready
        self._server: WSGIServer | None = None
        if not port:
            return
        try:
            kind = _Server6 if ":" in host else WSGIServer
            self._server = make_server(host, port, self._answer, server_class=kind, handler_class=_Quiet)
        except OSError as error:
            rule = f"cannot be bound at {host} ({error.strerror})"
            raise ConfigError(name, port, rule, "free it or set another (0: none)") from None

    @property
    def port(self) -> int:
        """The port served, or 0."""
        return self._server.server_port if self._server else 0

    def __enter__(self) -> "MetricsPage":
        if self._server:
            threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="metrics").start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._server:
            self._server.shutdown()
            self._server.server_close()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path == "/metrics":
            start("200 OK", [("Content-Type", CONTENT_TYPE_LATEST)])
            return [generate_latest(REGISTRY)]
        good = {"/livez": True, "/readyz": self._ready()}.get(path)
        status = "404 Not Found" if good is None else "200 OK" if good else "503 Service Unavailable"
        start(status, [("Content-Type", "application/json")])
        return [json.dumps({"path": path, "ok": bool(good)}).encode()]
