"""`hpp-exec serve` on many nodes behind Ray Serve: requests of one conversation go where its KV cache is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import subprocess
import tempfile
import threading
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import filelock
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from . import _commands
from ._errors import HppError
from ._onnxruntime import environment
from ._plan import StrPath
from ._ray_nodes import Plans, computing_nodes, kind_of_this_node, plan_for

# Characters of a prompt without messages that name its conversation: a longer prompt that begins so continues it.
START = 256
# Requests of one engine before others get some, which must compute the conversation again.
ONGOING = 64
# Seconds to load a model.
LOADING = 600
# By name: Serve would copy a class, and the copy would not know the requests of this module as its own.
ROUTER = "hpp.ray.ConversationRouter"
# What hpp-exec serve answers without a key: its page, which asks for one, and its health.
WITHOUT_KEY = ("/", "/health")
# Tells where the pages in a directory of KV pages are known to be.
PLACE = "place"


@dataclasses.dataclass(frozen=True)
class Forwarded:
    """A request on its way to an engine."""

    conversation: str
    method: str
    path: str
    body: bytes


def conversation(body: bytes, path: str = "") -> str:
    """What names the conversation of a request: its `session_id`; else its messages up to the first of the user, which all its later requests
    have too; else the start of its prompt; else its path."""
    try:
        fields = json.loads(body)
    except ValueError:
        return path
    if not isinstance(fields, dict):
        return path
    model = str(fields.get("model") or "")
    if fields.get("session_id") is not None:
        return f"{model}\nsession\n{fields['session_id']}"
    messages = fields.get("messages")
    if isinstance(messages, list):
        roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
        end = roles.index("user") + 1 if "user" in roles else len(messages)
        return f"{model}\nmessages\n{json.dumps(messages[:end], sort_keys=True)}"
    prompt = fields.get("prompt")
    if isinstance(prompt, (str, list)):
        return f"{model}\nprompt\n{json.dumps(prompt[:START])}"
    return path


def rank(conversation: str, place: str) -> bytes:
    """How much a conversation prefers a place: each conversation orders the places in its own way, and an order does not change when other
    places come or go (rendezvous hashing; Thaler and Ravishankar 1998)."""
    return hashlib.blake2b(f"{place}\n{conversation}".encode(), digest_size=16).digest()


class ConversationRouter(RequestRouter):
    """Sends every request of a conversation to one replica while that takes requests, and to the next in the conversation's own order if it is
    full or gone. It keeps no table, so routers agree with each other, and after a restart conversations are found where they were parked."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        request = pending_request.args[0] if pending_request and pending_request.args else None
        name = request.conversation if isinstance(request, Forwarded) else ""

        def preference(replica: RunningReplica) -> bytes:
            return rank(name, str(replica.replica_metadata.get(PLACE) or replica.replica_id.unique_id))

        return [[replica] for replica in sorted(candidate_replicas, key=preference, reverse=True)]


class EngineReplica:
    """Runs `hpp-exec serve` on its node and passes requests on to it."""

    def __init__(self, plans: Plans, kv_dir: str, options: Mapping[str, Any]) -> None:
        self.directory = free_directory(Path(kv_dir))
        self.place = place_of(self.directory.path)
        self.key = secrets.token_hex(16)
        plan = plan_for(plans, kind_of_this_node())
        arguments = ["serve", plan, "--port=0", f"--kv-dir={self.directory.path / 'pages'}", *_commands.flags(options)]
        self.server = subprocess.Popen(
            [_commands.find("hpp-exec"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**environment(), "HPP_API_KEY": self.key},
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self.lines: list[str] = []
        self.address = ""
        self.ready = threading.Event()
        threading.Thread(target=self.listen, daemon=True).start()
        if not self.ready.wait(LOADING) or not self.address:
            self.server.kill()
            raise _commands.failure("hpp-exec serve", self.server.wait(), self.lines)
        self.client: aiohttp.ClientSession | None = None

    def listen(self) -> None:
        """Reads what the server says, and notes its address."""
        assert self.server.stderr is not None
        for line in self.server.stderr:
            self.lines = [*self.lines[-50:], line.rstrip("\n")]
            if line.startswith("serving ") and " at http://" in line:
                self.address = line.split(" at ", 1)[1].split(" ", 1)[0].rstrip("\n")
                self.ready.set()
        self.ready.set()

    def record_replica_metadata(self) -> dict[str, Any]:
        """What the router knows of this replica."""
        return {PLACE: self.place}

    def check_health(self) -> None:
        """Ray replaces the replica if this raises."""
        status = self.server.poll()
        if status is not None:
            raise _commands.failure("hpp-exec serve", status, self.lines)

    async def forward(self, request: Forwarded) -> AsyncIterator[Any]:
        """The status and the content type of the answer, then its bytes as they come. Leaving it ends the request in the engine."""
        if self.client is None:
            self.client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        url = self.address + request.path
        async with self.client.request(request.method, url, data=request.body or None, headers=headers) as answer:
            kept = {name: answer.headers[name] for name in ("Content-Type", "Retry-After") if name in answer.headers}
            yield answer.status, {**kept, "X-HPP-Place": self.place}
            async for piece in answer.content.iter_any():
                yield piece

    def __del__(self) -> None:
        server = getattr(self, "server", None)
        if server is not None and server.poll() is None:
            # SIGTERM: the server writes pages that are not on disk yet.
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()


class Front:
    """Takes HTTP requests and sends them to the engine of their conversation."""

    def __init__(self, engines: Any, api_key: str | None) -> None:
        self.engines = engines.options(stream=True)
        self.api_key = api_key

    async def __call__(self, request: Request) -> Response:
        if request.url.path not in WITHOUT_KEY and not self.has_key(request):
            message = "a key is needed: Authorization: Bearer KEY"
            return JSONResponse({"error": {"message": message, "type": "authentication_error", "param": None, "code": None}}, 401)
        body = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        forwarded = Forwarded(conversation(body, path), request.method, path, body)
        answer = self.engines.forward.remote(forwarded)
        status, headers = await anext(aiter(answer))
        return StreamingResponse(answer, status, headers)

    def has_key(self, request: Request) -> bool:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        return self.api_key is None or secrets.compare_digest(given.encode(), self.api_key.encode())


@dataclasses.dataclass
class Directory:
    """A directory of KV pages, and the lock that keeps other engines out."""

    path: Path
    lock: filelock.FileLock


def free_directory(parent: Path) -> Directory:
    """The first directory below `parent` that no engine uses, so that an engine that is started again finds the pages of an earlier one."""
    for number in range(1 << 16):
        path = parent / f"engine-{number}"
        path.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path / "lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            continue
        return Directory(path, lock)
    raise HppError(f"all directories in {parent} are in use")


def place_of(directory: Path) -> str:
    """The name that a directory got when it was made, which goes with its pages."""
    path = directory / PLACE
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as file:
            file.write(uuid.uuid4().hex)
        os.replace(file.name, path)
    return path.read_text()


def server(
    plans: Plans,
    kv_dir: StrPath,
    *,
    nodes: int | None = None,
    ongoing: int = ONGOING,
    api_key: str | None = None,
    ray_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> serve.Application:
    """A Ray Serve application with OpenAI's API: `serve.run(hpp.ray.server("model/", "kv"))`.

    Each node runs one `hpp-exec serve`. Requests of a conversation go to the same engine, which has its KV pages in memory or on its disk, also
    after a restart of everything.

    Args:
        plans: a plan, or a model that each node plans for itself, or one of either for each kind of node (label `hpp-kind`).
        kv_dir: the directory of KV pages on each node, as `--kv-dir`. What is saved there tells what was said.
        nodes: how many nodes serve. By default, all that have processors now.
        ongoing: requests of one engine at a time before the next engine of a conversation's order takes some.
        api_key: the key that clients must have. The engines listen on their own nodes alone and have keys of their own.
        ray_options: resources of an engine, for `ray_actor_options`.
        options: options of `hpp-exec serve --help`, with `_` for `-`: `threads=8`, `kv_disk="64G"`.
    """
    routing = RequestRouterConfig(request_router_class=ROUTER)  # type: ignore[arg-type]
    replicas = serve.deployment(
        name="engines",
        num_replicas=nodes or len(computing_nodes()),
        max_replicas_per_node=1,
        max_ongoing_requests=ongoing,
        request_router_config=routing,
        ray_actor_options=dict(ray_options or {"num_cpus": 1}),
    )
    engines = replicas(EngineReplica).bind(plans, os.fspath(Path(kv_dir).absolute()), options)
    front = serve.deployment(name="front", max_ongoing_requests=ongoing * 16)
    application: serve.Application = front(Front).bind(engines, api_key)
    return application
