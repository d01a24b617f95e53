"""The dashboard's HTTP server: a page, and a stream of server-sent events for each browser that shows it.

It listens on loopback. Pages and streams need the token; the Host header must name loopback, so that no foreign name
that resolves to 127.0.0.1 is answered; and the page may load nothing but its own files.

A run's files are read only while a stream is open.
"""

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from secrets import compare_digest

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tahq_launch.dashboard.process import Listener
from tahq_launch.dashboard.run_feed import RunFeed

POLL_S = 0.5
"""Between two looks at a run's files, while a browser shows them."""
ALIVE_S = 15.0
"""A stream without news sends a comment this often, which fails once the browser has gone."""
PAGE = Path(__file__).with_name("page")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Dashboard:
    """The server of one run's folder."""

    def __init__(self, folder: Path, token: str) -> None:
        self._folder = folder
        self._token = token.encode()
        routes = [
            Route("/", self._page),
            Route("/events", self._events),
            *(Route(f"/dashboard.{kind}", self._file) for kind in ("css", "js")),
        ]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"], www_redirect=False)
        config = uvicorn.Config(
            Starlette(routes=routes, middleware=[hosts]),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,  # it would contain the token
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        self.server = uvicorn.Server(config)

    def _refusal(self, request: Request) -> Response | None:
        if compare_digest(request.query_params.get("token", "").encode(), self._token):
            return None
        text = "the token is missing or wrong: open the address that was printed\n"
        return PlainTextResponse(text, 403, headers=HEADERS)

    async def _page(self, request: Request) -> Response:
        return self._refusal(request) or FileResponse(PAGE / "dashboard.html", headers=HEADERS)

    async def _file(self, request: Request) -> Response:
        return FileResponse(PAGE / request.url.path.removeprefix("/"), headers=HEADERS)

    async def _events(self, request: Request) -> Response:
        stream = StreamingResponse(self._stream(), media_type="text/event-stream", headers=HEADERS)
        return self._refusal(request) or stream

    async def _stream(self) -> AsyncIterator[str]:
        feed, said_s = RunFeed(self._folder), time.monotonic()
        while True:
            is_last = self.server.should_exit
            message = await asyncio.to_thread(feed.news)
            if message is not None or time.monotonic() - said_s > ALIVE_S:
                said_s = time.monotonic()
                yield f"data: {json.dumps(message, allow_nan=False)}\n\n" if message is not None else ":\n\n"
            if is_last or feed.is_over:
                return
            if not feed.has_more:
                await asyncio.sleep(POLL_S)


def serve(folder: Path, listener: Listener) -> None:
    """Serve the page of a run until this process is interrupted."""
    Dashboard(folder, listener.token).server.run(sockets=[listener.socket])


def main() -> None:
    """Serve a launcher's run on the socket that it has opened, until stdin, which began with the token, ends."""
    folder, descriptor = sys.argv[1:]
    server = Dashboard(Path(folder), sys.stdin.readline().strip()).server

    def end_with_launcher() -> None:
        sys.stdin.read()
        server.should_exit = True

    os.nice(10)
    threading.Thread(target=end_with_launcher, daemon=True).start()
    server.run(sockets=[socket.socket(fileno=int(descriptor))])


if __name__ == "__main__":
    main()
