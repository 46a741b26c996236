"""A Hugging Face hub of the tests' own: the few answers that fetching a dataset's files asks for."""

import hashlib
import http.server
import json
import threading
from pathlib import Path
from typing import Self

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves the files of a folder as the dataset of that name; counts what was asked for."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.asked: list[str] = []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def files(self) -> dict[str, bytes]:
        paths = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        path = request.path.split("?")[0]
        self.asked.append(f"{request.command} {path}")
        files = self.files()
        headers, status = {"X-Repo-Commit": COMMIT}, 200
        if path in (f"/api/datasets/{self.name}", f"/api/datasets/{self.name}/revision/main"):
            body = json.dumps(
                {"id": self.name, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            ).encode()
        elif path == f"/api/datasets/{self.name}/revision/{COMMIT}":
            body = json.dumps({"id": self.name, "sha": COMMIT}).encode()
        elif path.startswith(f"/api/datasets/{self.name}/tree/{COMMIT}"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            body = json.dumps(tree).encode()
        elif path.startswith(start := f"/datasets/{self.name}/resolve/{COMMIT}/") and path.removeprefix(start) in files:
            body = files[path.removeprefix(start)]
            headers["ETag"] = f'"{hashlib.sha1(body).hexdigest()}"'
        else:
            body, status = json.dumps({"error": "Repository not found"}).encode(), 404
            headers["X-Error-Code"] = "RepoNotFound"
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)
