"""The dashboard's web application: its pages, JSON and streams, and the access to them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from starlette.applications import Starlette
from starlette.datastructures import URL, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redelastic.monitoring import logs
from redelastic.monitoring.control import UnknownNodeError, UnknownRunError
from redelastic.monitoring.events import VERSION
from redelastic.monitoring.sentences import event_document
from redelastic.redis.connection import Connection
from redelastic.redis.errors import RedelasticError
from redelastic.redis.routes import host_and_port, names_loopback

from .actions import Action, Actions, BusyError
from .reader import Reader, node_of
from .standalone import PAGE

MAX_REQUEST: Final = 10_000  # bytes
COOKIE: Final = "redelastic-dashboard"  # plus the port: browsers send a host's cookies to all its ports
# Only redelastic's own scripts and styles run; nothing is loaded from outside, and no page may frame this one.
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def make_app(
    connection: Connection,
    prefix: str,
    token: str | None,
    *,
    actions: Actions | None = None,
    links: Sequence[tuple[str, str]] = (),
) -> Starlette:
    """The application.

    Args:
        connection: to Redis.
        prefix: prefix of the runs' keys.
        token: what a browser must present; None to let in only browsers on this machine.
        actions: for requests to runs; None if there may be none.
        links: names and templates of addresses elsewhere.
    """
    reader = Reader(connection, prefix, {"actions": actions is not None, "links": list(links)})

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        reading = asyncio.create_task(reader.run())
        yield
        if actions:
            actions.close()
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading

    app = Starlette(
        routes=[
            Route("/", _page),
            Route("/runs/{run:path}", _page),
            Route("/live", _live),
            Route("/api/runs", _runs),
            Route("/api/runs/{run:path}", _run),
            Route("/api/runs/{run:path}", _act, methods=["POST"]),
            Mount("/page", StaticFiles(directory=PAGE)),
        ],
        middleware=[
            Middleware(_Guard, token=token),
            # Not of streams. A run of 1,000 nodes takes 44 ms at level 6, 164 ms at 9, and all requests wait meanwhile.
            Middleware(GZipMiddleware, minimum_size=1000, compresslevel=6),
        ],
        exception_handlers=dict.fromkeys(
            (HTTPException, UnknownRunError, UnknownNodeError, BusyError, RedelasticError), _refused
        ),
        lifespan=lifespan,
    )
    app.state.reader, app.state.actions = reader, actions
    return app


# -- what it serves


async def _page(_: Request) -> Response:
    return FileResponse(PAGE / "index.html")


async def _live(request: Request) -> Response:
    events = _reader(request).follow(request.query_params.get("run"))
    return StreamingResponse(events, media_type="text/event-stream")


async def _runs(request: Request) -> Response:
    runs, unlisted = await _reader(request).summaries()
    return _json({"runs": runs, "unlisted": unlisted})


async def _run(request: Request) -> Response:
    """A run; with ``?node=ID`` that node, with ``?event=ID`` that event, with ``?logs`` the places of its logs.

    With ``?node=ID&tail=R`` the end of the log of that node's worker with the local rank R, once it has answered.
    """
    watch = await _reader(request).watch(request.path_params["run"])
    asked = request.query_params
    found: Mapping[str, Any] | None
    if "tail" in asked:
        found = await _reader(request).tail(watch, asked.get("node", ""), asked["tail"])
    elif "node" in asked:
        found = node_of(watch, asked["node"])
    elif "event" in asked:
        found = next((event_document(e) for e in watch.event_log.events if e.id == asked["event"]), None)
    elif "logs" in asked:
        found = logs.document(watch.run, watch.event_log.events)
    else:
        found = watch.report
    if found is None:
        raise HTTPException(404, "The run has no such node or event.")
    return _json(found)


async def _act(request: Request) -> Response:
    """A request to a run; a page from elsewhere can send none: a form has another type, a script another origin."""
    actions: Actions | None = request.app.state.actions
    if actions is None:
        raise HTTPException(405, "This dashboard only shows: it was started without --allow-actions.")
    if request.headers.get("content-type") != "application/json":
        raise HTTPException(415, "A request must be of the type application/json.")
    origin = request.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
        raise HTTPException(403, f"Requests of pages of {origin} are refused. A proxy has to pass `Host` on unchanged.")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_REQUEST:
            raise HTTPException(413, f"A request has at most {MAX_REQUEST} bytes.")
    address = request.client.host if request.client else "an unknown address"
    try:
        asked = Action.parse(body)
    except ValueError as e:
        raise HTTPException(400, str(e)) from e
    watch = await _reader(request).watch(request.path_params["run"])
    return _json({"text": await actions.perform(watch.keys.run_id, asked, address)})


def _reader(request: Request) -> Reader:
    reader: Reader = request.app.state.reader
    return reader


def _json(document: Mapping[str, Any]) -> Response:
    text = json.dumps({"version": VERSION, **document}, allow_nan=False)
    return Response(text, media_type="application/json")


async def _refused(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code)
    return JSONResponse({"error": str(error)}, 404 if isinstance(error, UnknownRunError | UnknownNodeError) else 503)


# -- access


class _Guard:
    """Lets in clients with the token, or without one clients that use a local name of this machine; adds the headers.

    The token comes as ``Authorization: Bearer``, or once as ``?token=``, after which a cookie replaces it.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token
        self._pass = "" if token is None else hmac.new(token.encode(), COOKIE.encode(), hashlib.sha256).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
            await send(message)

        answer = self._app if (refusal := self._refusal(Request(scope))) is None else refusal
        await answer(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> Response | None:
        """The answer if the request is refused; None to let it in."""
        host, port = host_and_port(request.headers.get("host", ""))  # the port is empty if it is the scheme's default
        if self._token is None:
            # A page from elsewhere, its name rebound to this address, would send that name.
            if names_loopback(host):
                return None
            return PlainTextResponse(
                "Without --token-file the dashboard answers only to localhost and loopback addresses, not to this "
                "name.\n",
                403,
            )
        cookie = f"{COOKIE}-{port}" if port else COOKIE
        given = request.query_params.get("token")
        if given is not None and _same(given, self._token):
            answer = RedirectResponse(_without_token(request.url), 303)
            answer.set_cookie(
                cookie, self._pass, httponly=True, samesite="strict", secure=request.url.scheme == "https"
            )
            return answer
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        known = _same(request.cookies.get(cookie, ""), self._pass)
        if known or (scheme.lower() == "bearer" and _same(bearer, self._token)):
            return None
        return PlainTextResponse(
            "This dashboard requires its token: open it once as /?token=… with the token from its --token-file.\n",
            401,
            {"WWW-Authenticate": "Bearer"},
        )


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(errors="surrogatepass"), expected.encode())


def _without_token(url: URL) -> str:
    """Where the browser goes on, on this host: after two slashes it would take what comes next for a host."""
    rest = url.remove_query_params("token")
    return "/" + rest.path.lstrip("/\\") + (f"?{rest.query}" if rest.query else "")
