"""A Hub of models and data sets on this machine, as much of it as huggingface_hub asks for.

with FakeHub({"models/me/tiny": folder, "datasets/me/texts": folder}, gated={"models/me/gated"}) as hub: a command with
hub.environment uses it in place of huggingface.co. Any other name is missing. hub.requests lists what was asked for.
With made=FOLDER, models can be pushed: each commit is in hub.commits, and its files are in FOLDER/OWNER/NAME.
"""

import base64
import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

REVISION = "1" * 40


class FakeHub:
    def __init__(self, repositories: dict[str, Path], gated: set[str] = frozenset(), made: Path | None = None):
        self.repositories, self.gated, self.requests = dict(repositories), gated, []
        self.made, self.commits, self.objects, self.is_private = made, [], {}, {}
        handler = type("Handler", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.environment = {
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server.server_port}",
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": "hf_fake",
            "NO_PROXY": "127.0.0.1",
        }

    def __enter__(self) -> "FakeHub":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.server.shutdown()
        self.server.server_close()


class Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, *_) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0)).decode()
        self.answer(body)

    def answer(self, body: str = "") -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        words = unquote(urlsplit(self.path).path).strip("/").split("/")
        if self.command == "POST" and self.hub.made and "paths-info" not in words:
            self.send_json(self.pushed(words, body))
        elif words[0] == "api":
            self.answer_about("/".join(words[1:4]), words[4:], body)
        else:
            words = words if words[0] == "datasets" else ["models", *words]
            self.send_content("/".join(words[:3]), words[5:])  # KIND/OWNER/NAME/resolve/REVISION/FILE

    def do_PUT(self) -> None:
        """A large file."""
        self.hub.requests.append(f"PUT {self.path}")
        self.hub.objects[self.path.split("/")[-1]] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send(200, b"", {})

    def pushed(self, words: list[str], body: str) -> dict:
        """What the Hub answers to the requests of a push."""
        if words[-1] == "validate-yaml":
            return {"errors": [], "warnings": []}
        if words[-1] == "create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            folder = self.hub.repositories.setdefault(f"models/{name}", self.hub.made / name)
            folder.mkdir(parents=True, exist_ok=True)
            self.hub.is_private[name] = asked.get("visibility") == "private"
            return {"url": f"{self.hub.environment['HF_ENDPOINT']}/{name}"}
        if words[-1] == "batch":
            objects = [self.large_file(one["oid"], one["size"]) for one in json.loads(body)["objects"]]
            return {"transfer": "basic", "objects": objects}
        name = "/".join(words[2:4])
        if "preupload" in words:
            kinds = {True: "lfs", False: "regular"}
            asked = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": one, "uploadMode": kinds[one.endswith((".safetensors", ".png"))]} for one in asked]
            return {"files": [one | {"shouldIgnore": False} for one in files]}
        self.commit(self.hub.repositories[f"models/{name}"], [json.loads(line) for line in body.splitlines()])
        return {"commitUrl": f"{self.hub.environment['HF_ENDPOINT']}/{name}/commit/{REVISION}", "commitOid": REVISION}

    def large_file(self, oid: str, size: int) -> dict:
        place = {"href": f"{self.hub.environment['HF_ENDPOINT']}/objects/{oid}"}
        return {"oid": oid, "size": size} | ({} if oid in self.hub.objects else {"actions": {"upload": place}})

    def commit(self, folder: Path, lines: list[dict]) -> None:
        for line in lines:
            value = line["value"]
            if "path" in value:
                (folder / value["path"]).parent.mkdir(parents=True, exist_ok=True)
            if line["key"] == "header":
                self.hub.commits.append(value["summary"])
            elif line["key"] == "file":
                (folder / value["path"]).write_bytes(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                (folder / value["path"]).write_bytes(self.hub.objects[value["oid"]])
            elif line["key"] == "deletedFile":
                (folder / value["path"]).unlink()

    def refuse(self, status: int, code: str, message: str) -> None:
        self.send(status, json.dumps({"error": message}).encode(), {"X-Error-Code": code, "X-Error-Message": message})

    def knows(self, name: str) -> bool:
        if name in self.hub.gated:
            self.refuse(401, "GatedRepo", f"Access to {name} is restricted. You must be authenticated to access it.")
        elif name not in self.hub.repositories:
            self.refuse(401, "RepoNotFound", "Repository not found")  # As the Hub answers, without a token.
        return name in self.hub.repositories and name not in self.hub.gated

    def answer_about(self, name: str, rest: list[str], body: str) -> None:
        if name not in self.hub.repositories and name in self.hub.gated and rest[:1] != ["tree"]:
            return self.refuse(401, "GatedRepo", "gated")
        if not self.knows(name):
            return None
        files = sorted(path for path in self.hub.repositories[name].rglob("*") if path.is_file())
        names = [str(path.relative_to(self.hub.repositories[name])) for path in files]
        entries = [entry(path, name) for path, name in zip(files, names)]
        if rest[:1] == ["tree"]:
            below = "/".join(rest[2:])
            found = [one for one in entries if one["path"].startswith(f"{below}/" if below else "")]
            if below and not found:
                return self.refuse(404, "EntryNotFound", "no such folder")
            return self.send_json(found)
        if rest[:1] == ["paths-info"]:
            asked = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body).get("paths", [])
            return self.send_json([one for one in entries if one["path"] in asked])
        about = {"id": name.split("/", 1)[1], "sha": REVISION, "private": False, "gated": False, "disabled": False}
        return self.send_json(about | {"siblings": [{"rfilename": name} for name in names], "tags": [], "downloads": 0})

    def send_content(self, name: str, path: list[str]) -> None:
        if not self.knows(name):
            return
        file = self.hub.repositories[name] / "/".join(path)
        if not file.is_file():
            self.refuse(404, "EntryNotFound", "no such file")
            return
        content = file.read_bytes()
        self.send(200, content, {"X-Repo-Commit": REVISION, "ETag": f'"{oid(file)}"'})

    def send_json(self, found) -> None:
        self.send(200, json.dumps(found).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


def entry(file: Path, name: str) -> dict:
    return {"type": "file", "path": name, "size": os.path.getsize(file), "oid": oid(file)}
