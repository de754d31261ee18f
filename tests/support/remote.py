"""Real servers on the loopback: HTTP with byte ranges that misbehaves on demand, and S3."""

import contextlib
import hashlib
import logging
import os
import re
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dataloader_svc import remote

BUCKET = "shards"
FAULTS = ("500", "short", "cut", "reset", "stall")


class RangeServer(ThreadingHTTPServer):
    """Serves a folder with ranges, ETags and If-Match.

    Each GET takes the next of `faults`, where there is one: `500`, `short` (half of the range, and it says so), `cut`
    (half, though it says all), `reset` of the connection, `stall` (silence until the server closes). While `down` is
    set every request gets 503. Without `ranges` it sends whole files; without `tags` neither ETag nor Last-Modified.
    `served` lists (method, name, first byte, last byte) of every good answer.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.faults: deque[str] = deque()
        self.served: list[tuple[str, str, int, int]] = []
        self.down = threading.Event()
        self.closing = threading.Event()
        self.ranges = self.tags = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""


class Handler(BaseHTTPRequestHandler):
    """One request; the connection is kept where nothing went wrong."""

    protocol_version = "HTTP/1.1"
    server: RangeServer

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are no news."""

    def do_HEAD(self) -> None:
        self._answer(b"", False)

    def do_GET(self) -> None:
        fault = self.server.faults.popleft() if self.server.faults else ""
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
        elif fault == "stall":
            self.server.closing.wait(60)
            self.close_connection = True
        elif fault == "500":
            self._refuse(500)
        else:
            self._answer(fault.encode(), True)

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _answer(self, fault: bytes, body: bool) -> None:
        path = self.server.folder / self.path.lstrip("/")
        if self.server.down.is_set() or not path.is_file():
            self._refuse(503 if self.server.down.is_set() else 404)
            return
        data, tag = path.read_bytes(), f'"{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"'
        if self.headers.get("If-Match", tag) != tag:
            self._refuse(412)
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if self.server.ranges else None
        first, last = (int(wanted[1]), min(int(wanted[2]), len(data) - 1)) if wanted else (0, len(data) - 1)
        data = data[first : last + 1]
        sent = data[: len(data) // 2] if fault in (b"short", b"cut") else data
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(sent if fault == b"short" else data)))
        if self.server.tags:
            self.send_header("ETag", tag)
        self.end_headers()
        if body:
            self.wfile.write(sent)
        self.close_connection = self.close_connection or fault == b"cut"
        if not fault:
            self.server.served.append((self.command, path.name, first, last))


@contextlib.contextmanager
def http_server(folder: Path) -> Iterator[RangeServer]:
    """A running server, ended at the end."""
    server = RangeServer(folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(60)


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """An S3 server that holds every file of the folder in BUCKET; this process and its children are pointed at it."""
    moto, boto3 = pytest.importorskip("moto.server"), pytest.importorskip("boto3")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    old = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        for path in sorted(folder.iterdir()):
            client.put_object(Bucket=BUCKET, Key=path.name, Body=path.read_bytes())
        client.close()
        yield f"s3://{BUCKET}"
    finally:
        server.stop()
        remote._filesystem.cache_clear()
        for name, value in old.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
