"""A server of this machine alone that answers wandb as its own would: enough to receive runs, and to resume them."""

import gzip
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Received:
    """What was sent for one run: history as rows in their order, the ends of its sessions, its files and artifacts."""

    def __init__(self, group, display_name):
        self.group, self.display_name = group, display_name
        self.history, self.ends, self.files, self.artifacts, self.summary = [], [], {}, [], {}

    def resumable(self):
        """The run as wandb asks for it before it goes on."""
        return {
            "id": "id",
            "name": "name",
            "displayName": self.display_name,
            "summaryMetrics": json.dumps(self.summary),
            "config": "{}",
            "tags": [],
            "notes": None,
            "wandbConfig": '{"t": 1}',
            "logLineCount": 0,
            "eventsLineCount": 0,
            "eventsTail": "[]",
            "historyLineCount": len(self.history),
            "historyTail": json.dumps([json.dumps(row) for row in self.history[-1:]]),
        }


@contextmanager
def wandb_server():
    """Yields (address, {run id: Received})."""
    runs = {}
    entity = {"id": "entity", "name": "entity"}

    def answer(operation, given, address):
        name = given.get("name")
        if operation == "UpsertBucket":
            new = name not in runs
            run = runs.setdefault(name, Received(given["groupName"], given["displayName"]))
            project = {"id": "project", "name": given["project"], "entity": entity}
            bucket = {"id": "id", "name": name, "displayName": run.display_name, "config": "{}", "project": project}
            return {"upsertBucket": {"bucket": {**bucket, "historyLineCount": 0}, "inserted": new}}
        if operation == "RunResumeStatus":
            bucket = runs[name].resumable() if name in runs else None
            return {"model": {"id": "project", "name": "project", "entity": entity, "bucket": bucket}}
        if operation == "CreateArtifact":
            wanted = given["input"]
            runs[wanted["runName"]].artifacts.append(wanted["artifactTypeName"])
            artifact = {"id": "artifact", "state": "COMMITTED", "artifactSequence": {"latestArtifact": None}}
            return {"createArtifact": {"artifact": artifact}}
        if operation == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{address}/{given['run']}/{file}"} for file in given["files"]]
            return {"createRunFiles": {"runID": "id", "uploadHeaders": [], "files": files}}
        if operation == "Viewer":
            viewer = {"id": "user", "entity": "entity", "username": "user", "flags": "{}", "teams": {"edges": []}}
            return {"viewer": viewer}
        return None

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def body(self):
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(sent) if self.headers.get("Content-Encoding") == "gzip" else sent

        def reply(self, value):
            text = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_PUT(self):
            _, run, name = self.path.split("/", 2)
            runs[run].files[name] = self.body()
            self.reply({})

        def do_POST(self):
            sent = json.loads(self.body())
            if not self.path.endswith("/file_stream"):
                address = f"http://127.0.0.1:{self.server.server_port}"
                found = answer(sent.get("operationName"), sent.get("variables") or {}, address)
                self.reply({"data": found} if found else {"errors": [{"message": "not known here"}]})
                return
            run = runs[self.path.split("/")[-2]]
            files = sent.get("files") or {}
            if "wandb-history.jsonl" in files:
                first, rows = files["wandb-history.jsonl"]["offset"], files["wandb-history.jsonl"]["content"]
                run.history[first : first + len(rows)] = [json.loads(row) for row in rows]
            if "wandb-summary.json" in files:
                run.summary = json.loads(files["wandb-summary.json"]["content"][-1])
            if sent.get("complete"):
                run.ends.append(sent["exitcode"])
            self.reply({"limits": {}})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", runs
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
