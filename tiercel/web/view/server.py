"""The server of the page: on 127.0.0.1, for those who know its address. It only answers GET, and writes no file."""

import hmac
import json
import re
from collections.abc import Callable, Mapping

from markupsafe import Markup
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiercel.errors import RunError
from tiercel.runs.pictures import picture_file, webp
from tiercel.web.report.page import asset
from tiercel.web.report.page_sections import (
    TABS,
    compared_evaluations,
    details_part,
    findings_part,
    held_out_part,
    times_part,
)
from tiercel.web.report.pictures import UNREADABLE, in_words, opened
from tiercel.web.report.reading import RecordedRun
from tiercel.web.report.templates import drawn
from tiercel.web.view.cards import LinkedAlbum, cards_part, row_part
from tiercel.web.view.compare import MOST_RUNS, compare_part
from tiercel.web.view.filters import FOLDER_TITLES, ORDERS, after_of, find, wanted_of
from tiercel.web.view.live import LiveRun
from tiercel.web.view.ranks import ranks_part, status_part
from tiercel.web.view.runs import Following, Runs

CARDS = 10  # of one answer
SEARCH_SECONDS = 0.3  # of one answer; the page asks again
HOSTS = ("127.0.0.1", "localhost", "[::1]")
_PICTURE = re.compile(r"[0-9a-f]{64}")
_KEEP = {"cache-control": "private, max-age=31536000, immutable"}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; img-src 'self'; style-src 'self'; script-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}
SCRIPTS = ("charts.js", "page.js", "live.js")
_BAD_ROWS_SHOWN = 500
PARTS: Mapping[str, Callable[[LiveRun, RecordedRun], Markup]] = {  # of the page that show one run
    "status": lambda live, run: status_part(run),
    "curves": lambda live, run: live.overview(),
    "findings": lambda live, run: findings_part(live.symptoms()),
    "heldout": lambda live, run: held_out_part(compared_evaluations(run), LinkedAlbum(run.path, live.name)),
    "ranks": lambda live, run: ranks_part(run) + times_part(run),
    "details": lambda live, run: details_part(run, _BAD_ROWS_SHOWN),
}
_ASSETS = {"page.css": "text/css", "icon.svg": "image/svg+xml", **dict.fromkeys(SCRIPTS, "text/javascript")}


class Guard:
    """Answers requests whose path begins with the token and whose Host is this machine's; 403 to all others.

    `/?token=TOKEN` leads to `/TOKEN/`. So a page of another origin, which cannot know the token, cannot read anything,
    and neither can a name that was made to point here.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on without the token."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        given, _, rest = scope["path"].removeprefix("/").partition("/")
        if (answer := self._own_answer(Request(scope), given)) is not None:
            await answer(scope, receive, send_with_headers)
        else:
            await self._app({**scope, "path": f"/{rest}", "raw_path": None}, receive, send_with_headers)

    def _own_answer(self, request: Request, given: str) -> Response | None:
        """Return the answer to a request that is not handed on. `given`: the first part of its path."""
        host = request.headers.get("host", "")
        name, _, port = host.rpartition(":")
        if (name if port.isdigit() else host) not in HOSTS:
            return PlainTextResponse("Not a name of this machine.", 403)
        if request.scope["path"] == "/" and self._is_token(request.query_params.get("token", "")):
            return RedirectResponse(f"/{self._token}/", 303)
        if not self._is_token(given):
            return PlainTextResponse("The address has no token, or a wrong one; `tiercel view` prints it.", 403)
        return None

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", errors="replace"), self._token.encode())


def make_app(runs: Runs, token: str) -> tuple[Guard, Following]:
    """Make the server of these runs, and what ends its open connections."""
    following = Following(runs)
    pages = _Pages(runs)

    async def events(request: Request) -> Response:
        return StreamingResponse(following.events(), media_type="text/event-stream")

    def shell(request: Request) -> Response:
        """Return the page that the script fills."""
        names = [run.name for run in runs.all()]
        controls = {"tabs": TABS, "folders": FOLDER_TITLES, "orders": ORDERS}
        return HTMLResponse(
            drawn("page.html", title="tiercel view", scripts=SCRIPTS, runs=names, status="", **controls)
        )

    app = Starlette(
        routes=[
            Route("/", shell),
            Route("/events", events),
            Route("/runs", lambda request: HTMLResponse(drawn("runs.html", runs=[run.name for run in runs.all()]))),
            Route("/compare", pages.compare),
            Route("/cards", pages.cards),
            Route("/row", pages.row),
            Route("/images/{sha256}", pages.picture),
            *(Route(f"/{name}", _asset) for name in _ASSETS),
            *(Route(f"/{name}", pages.part) for name in PARTS),
        ],
        exception_handlers={OSError: _unreadable, RunError: _unreadable},
        lifespan=lambda app: following.running(),
    )
    return Guard(app, token), following


class _Pages:
    """The answers that depend on a run. Starlette calls them in threads, so none holds up the others."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def _run(self, request: Request, name: str | None = None) -> LiveRun:
        if (run := self._runs.named(name or request.query_params.get("run", ""))) is None:
            raise HTTPException(404, "There is no run of this name (any more).")
        return run

    def part(self, request: Request) -> Response:
        live, draw = self._run(request), PARTS[request.url.path.rpartition("/")[2]]
        if not (live.path / "config.yaml").exists():
            return HTMLResponse("<p>The run has not begun: its directory has no config.yaml yet.</p>")
        return HTMLResponse(draw(live, live.read()))

    def compare(self, request: Request) -> Response:
        names = request.query_params.getlist("run")[:MOST_RUNS]
        runs = [self._run(request, name) for name in names]
        return HTMLResponse(compare_part([(live.name, live.read()) for live in runs]))

    def cards(self, request: Request) -> Response:
        live, wanted = self._run(request), wanted_of(request.query_params)
        columns = live.known_groups().columns(wanted.folder)
        after = after_of(request.query_params)
        found = find(live.path, columns, wanted, after=after, most=CARDS, seconds=SEARCH_SECONDS)
        block = cards_part(live.path, live.name, columns, wanted, found)
        unread = len(live.groups.unread)
        return HTMLResponse(block, headers={"x-unread": str(unread), "x-rewards": json.dumps(list(columns.rewards))})

    def row(self, request: Request) -> Response:
        live = self._run(request)
        return HTMLResponse(row_part(live.path, live.name, live.known_groups(), request.query_params.get("id", "")))

    def picture(self, request: Request) -> Response:
        """Return a picture by its hash, made as small as the page shows it."""
        live, sha256 = self._run(request), request.path_params["sha256"]
        if not _PICTURE.fullmatch(sha256):
            raise HTTPException(404, "A picture's name is its hash.")
        try:
            with opened(picture_file(live.path / "images", sha256)) as image:
                data = webp(image.convert("RGB"))
        except UNREADABLE as error:
            raise HTTPException(404, f"This picture cannot be read: {in_words(error)}.") from error
        return Response(data, media_type="image/webp", headers=_KEEP)


def _unreadable(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"Cannot be read now: {error}", 503)


def _asset(request: Request) -> Response:
    name = request.url.path.rpartition("/")[2]
    return Response(asset(name), media_type=_ASSETS[name])
