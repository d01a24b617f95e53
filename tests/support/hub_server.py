"""A server on loopback that speaks the Hugging Face Hub's protocol, as far as huggingface_hub asks for models
and datasets."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class HubServer:
    """Serves folders by the names of models and datasets, all at one commit; notes what was fetched.

    `most_nbytes`: after so many bytes of a file the connection breaks, once; `gated`: names that are refused.
    """

    def __init__(self, models: dict[str, Path], datasets: dict[str, Path]) -> None:
        self.models, self.datasets = models, datasets
        self.gated: set[str] = set()
        self.most_nbytes: int | None = None
        self.fetched: list[tuple[str, int]] = []
        """Names of files, and the byte from which on they were fetched."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                server.answer(self, sends=False)

            def do_GET(self) -> None:
                server.answer(self, sends=True)

            def log_message(self, *_: object) -> None:
                """Nothing: the tests' output has enough."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Safe to call twice."""
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def answer(self, request: BaseHTTPRequestHandler, *, sends: bool) -> None:
        path = request.path.partition("?")[0]
        models = (("models", name, f"/{name}", folder) for name, folder in self.models.items())
        datasets = (("datasets", name, f"/datasets/{name}", folder) for name, folder in self.datasets.items())
        for kind, name, place, folder in (*models, *datasets):
            if name in self.gated and name in path:
                return _error(request, 403, "GatedRepo", "Access to this model is restricted")
            files = [
                (file.relative_to(folder).as_posix(), file) for file in sorted(folder.rglob("*")) if file.is_file()
            ]
            if match := re.fullmatch(f"/api/{kind}/{name}(?:/revision/([^/]+))?", path):
                if match[1] not in (None, "main", COMMIT):
                    return _error(request, 404, "RevisionNotFound", "no such revision")
                siblings = [{"rfilename": file} for file, _ in files]
                return _json(request, {"id": name, "sha": COMMIT, "siblings": siblings})
            if re.fullmatch(f"/api/{kind}/{name}/tree/[^/]+", path):
                contents = [(name, file.read_bytes()) for name, file in files]
                return _json(
                    request, [{"type": "file", "path": f, "size": len(b), "oid": _etag(b)} for f, b in contents]
                )
            if match := re.fullmatch(f"{place}/resolve/([^/]+)/(.+)", path):
                if match[1] not in ("main", COMMIT):
                    return _error(request, 404, "RevisionNotFound", "no such revision")
                return self._file(request, folder / match[2], sends=sends)
        return _error(request, 401, "RepoNotFound", "Invalid username or password")

    def _file(self, request: BaseHTTPRequestHandler, file: Path, *, sends: bool) -> None:
        if not file.is_file():
            return _error(request, 404, "EntryNotFound", "no such file")
        content = file.read_bytes()
        asked = _RANGE.fullmatch(request.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        last = int(asked[2]) if asked and asked[2] else len(content) - 1
        part = content[first : last + 1]
        request.send_response(206 if asked else 200)
        request.send_header("ETag", f'"{_etag(content)}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("Accept-Ranges", "bytes")
        request.send_header("Content-Length", str(len(part)))
        if asked:
            request.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        request.end_headers()
        if not sends:
            return None
        self.fetched.append((file.name, first))
        if self.most_nbytes is not None and len(part) > self.most_nbytes:
            part, self.most_nbytes = part[: self.most_nbytes], None
            request.close_connection = True
        request.wfile.write(part)
        return None


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _json(request: BaseHTTPRequestHandler, value: object) -> None:
    content = json.dumps(value).encode()
    request.send_response(200)
    request.send_header("Content-Type", "application/json")
    request.send_header("Content-Length", str(len(content)))
    request.end_headers()
    request.wfile.write(content)


def _error(request: BaseHTTPRequestHandler, status: int, code: str, text: str) -> None:
    request.send_response(status)
    request.send_header("X-Error-Code", code)
    request.send_header("X-Error-Message", text)
    request.send_header("Content-Length", "0")
    request.end_headers()


@contextmanager
def serving(models: dict[str, Path], datasets: dict[str, Path] | None = None) -> Iterator[HubServer]:
    """A server for as long as the context lasts."""
    server = HubServer(models, datasets or {})
    try:
        yield server
    finally:
        server.close()
