"""A server that answers what W&B's own client asks when it saves a workspace or a report, and keeps what it was sent.

No key was at hand to record real answers: these have the fields that the client's queries name, so that the client runs
whole, from its key to the address that it gives. What the real server makes of what it gets is not shown.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["WandbServer", "wandb_server"]

_OPERATION = re.compile(r"\b(?:query|mutation)\s+(\w+)")
_USER = {
    "id": "VXNlcg==",
    "username": "me",
    "name": "Me",
    "entity": "us",
    "flags": "{}",
    "email": "me@example.org",
    "admin": False,
    "deletedAt": None,
    "apiKeys": {"edges": []},
    "teams": {"edges": []},
}
_PROJECT = {
    "__typename": "Project",
    "id": "UHJvamVjdA==",
    "name": "gpt",
    "entityName": "us",
    "createdAt": "2026-01-01T00:00:00",
    "isBenchmark": False,
    "user": None,
}


class WandbServer(ThreadingHTTPServer):
    """On a port of its own.

    Attributes:
        views: variables of each view that was to be saved, by its kind: ``"project-view"``, ``"runs"``.
        refusal: where it is set, views are refused with these words.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.views: dict[str, dict[str, Any]] = {}
        self.refusal: str | None = None

    @property
    def url(self) -> str:
        """For ``WANDB_BASE_URL``."""
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """To a query or a mutation."""
        if operation in ("UpsertView2", "upsertView"):
            if self.refusal is not None:
                return {"errors": [{"message": self.refusal, "path": ["upsertView"]}], "data": None}
            self.views[variables["type"]] = variables
            about = {name: variables[name] for name in ("name", "displayName", "description", "type", "spec")}
            project = {"id": _PROJECT["id"], "name": variables["projectName"], "entityName": variables["entityName"]}
            view = {**about, "id": "Vmlldw==", "project": project, "updatedAt": "2026-01-01T00:00:00"}
            return {"data": {"upsertView": {"view": view, "inserted": True}}}
        page = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
        return {"data": {"viewer": _USER, "models": {"pageInfo": page, "edges": [{"node": _PROJECT}]}}}


class _Handler(BaseHTTPRequestHandler):
    server: WandbServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content: dict[str, Any] = {}
        if self.path == "/graphql":
            asked = json.loads(body)
            found = _OPERATION.search(asked["query"])
            content = self.server.answer("" if found is None else found[1], asked.get("variables") or {})
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """While it answers."""
    with WandbServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
