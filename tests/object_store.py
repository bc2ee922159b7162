"""moto's S3 server on the loopback address, which fails as a seed decides.

1. `serve` starts the server in threads of this process, on a free port, with one empty bucket.
   `set_environment` names it by the variables that every S3 client knows; other processes inherit
   them.
2. With `rate` above 0 so many of the requests, drawn with the seed, fail in one of `KINDS`.
   `refused` are answers that every request gets instead.
3. What the server really holds is looked at past the faults: `Server.objects`, `Server.put`.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from moto.s3.models import s3_backends
from s3fs import S3FileSystem
from werkzeug.serving import make_server

ERROR, SLOW_DOWN, SLOW, CUT_ANSWER = "error", "slow down", "slow", "cut answer"
LOST_UPLOAD, HALF_UPLOAD, NO_ANSWER = "lost upload", "half upload", "no answer"
KINDS = (ERROR, SLOW_DOWN, SLOW, CUT_ANSWER, LOST_UPLOAD, HALF_UPLOAD, NO_ANSWER)
"""500; 503; a late answer; one that ends in the middle; an upload of which half comes and nothing
or a half object is kept; one that is kept, but whose answer is lost."""
UPLOADS = (LOST_UPLOAD, HALF_UPLOAD, NO_ANSWER)
LATE = 0.3
"""Seconds by which a slow answer is late."""

Environ = dict[str, Any]
Start = Callable[..., Any]


class Server:
    """The server, its address, and what it was made to do."""

    def __init__(self) -> None:
        self.bucket = f"b-{uuid.uuid4().hex}"
        self.rate, self.kinds, self.draw = 0.0, KINDS, random.Random(0)
        self.refused: tuple[str, str] | None = None
        self.asked: Counter[str] = Counter()
        """Requests by method."""
        self.failed: Counter[str] = Counter()
        """Faults by kind."""
        self.on_request: Callable[[str, str], object] = lambda method, path: None
        """Called before each request is answered."""
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._server = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet
        )
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
        self._before = set(self._backend.buckets)
        self._backend.create_bucket(self.bucket, "us-east-1")
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def address(self, name: str) -> str:
        """The address of a store."""
        return f"s3://{self.bucket}/{name}"

    def fail(self, rate: float, seed: int, kinds: tuple[str, ...] = KINDS) -> None:
        """Let this share of the requests fail from now on."""
        self.rate, self.kinds, self.draw = rate, kinds, random.Random(seed)

    def objects(self, store: str) -> dict[str, bytes]:
        """Every object of a store by its path below it."""
        keys = self._backend.get_bucket(self.bucket).keys
        start = f"{store}/"
        return {
            name.removeprefix(start): keys[name].value
            for name in sorted(keys.keys())
            if name.startswith(start)
        }

    def buckets(self) -> list[str]:
        """Names of the buckets that were made since this server began."""
        return [name for name in self._backend.buckets if name not in self._before]

    def put(self, name: str, content: bytes) -> None:
        """Put an object there, past all faults."""
        self._backend.put_object(self.bucket, name, content)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: Environ, start: Start) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.on_request(method, path)
        with self._lock:
            self.asked[method] += 1
            kind = self.draw.choice(self.kinds) if self.draw.random() < self.rate else ""
            kind = "" if kind in UPLOADS and method != "PUT" else kind
            kind = "" if kind == CUT_ANSWER and method != "GET" else kind
            self.failed[kind] += bool(kind)
        if self.refused is not None:
            return _refuse(environ, start, *self.refused)
        if kind == ERROR:
            return _refuse(environ, start, "500 Internal Server Error", "InternalError")
        if kind == SLOW_DOWN:
            return _refuse(environ, start, "503 Slow Down", "SlowDown")
        if kind == SLOW:
            time.sleep(LATE)
        if kind in (LOST_UPLOAD, HALF_UPLOAD):
            half = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]) // 2)
            if kind == HALF_UPLOAD:
                self.put(path.partition(f"/{self.bucket}/")[2], half)
            return _hang_up(environ)
        answer = self._moto(environ, start)
        if kind == NO_ANSWER:
            b"".join(answer)
            return _hang_up(environ)
        return _cut(environ, answer) if kind == CUT_ANSWER else answer


class _Quiet(MotoRequestHandler):
    """Requests that keep their connection and are not logged."""

    protocol_version = "HTTP/1.1"

    def log(self, *_: object) -> None: ...


def _refuse(environ: Environ, start: Start, status: str, code: str) -> list[bytes]:
    """The answer of S3 to what it does not do."""
    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    text = f"<Error><Code>{code}</Code><Message>{code}, says the store.</Message></Error>".encode()
    text = b"" if environ["REQUEST_METHOD"] == "HEAD" else text
    start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
    return [text]


def _hang_up(environ: Environ) -> list[bytes]:
    """No answer, and the connection ends."""
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError


def _cut(environ: Environ, answer: Iterable[bytes]) -> Iterator[bytes]:
    """The first half of an answer's body; then the connection ends."""
    whole = b"".join(answer)
    yield whole[: len(whole) // 2]
    _hang_up(environ)


@contextlib.contextmanager
def serve() -> Iterator[Server]:
    """A server for the duration of a ``with`` block."""
    server = Server()
    try:
        yield server
    finally:
        server.close()


def set_environment(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Name an endpoint and keys by the variables that S3 clients know."""
    S3FileSystem.clear_instance_cache()
    patch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    patch.setenv("AWS_ACCESS_KEY_ID", "key")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        patch.setenv(name, "/nonexistent")
