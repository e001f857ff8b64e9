# SPDX-License-Identifier: Apache-2.0
"""The engine in this process: the same answers as a server's, and a life of its own. What clients do with it is in the
other tests, which run against both."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import ctkvr
import ctkvr.aio
import grpc
import numpy as np
import pytest
from ctkvr import _engine, errors
from ctkvr.channel import METHODS, Channel, GrpcChannel, Method
from ctkvr.embedded import EmbeddedChannel
from ctkvr.v1 import cache_pb2, session_pb2, tensor_pb2
from ctkvr.wire import Reply
from google.protobuf.message import Message

from conftest import GEOMETRY, SEED, Tokens
from server import ENGINE, SMALL_ENGINE, Server

# ---- The same answers ------------------------------------------------------------------------------------------------

OWN = (
    "boot_id",
    "session_epoch",
    "epoch",
    "cache_version",
    "lease_remaining_seconds",
)  # of a process, or of the moment
LAST_VERSION = 1  # stands for the one that the service gave last
FORMATS = ("F32", "F16", "BF16", "K8V8", "K8V4", "K6V4")
SOURCES = ("DENSE", "EXACT", "SKETCH", "QUERY_CENTROIDS", "KEY_CENTROIDS", "KEY_CENTROIDS_SKETCH", "AUTO")
LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 4, 2, 32, 16


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Channel, Channel]]:
    """A server and an engine in this process, with the same settings. No exact repeats: their pace is their own."""
    with Server("--truth_share=0") as server:
        remote = GrpcChannel(server.address, None)
        local = EmbeddedChannel(f"embedded://pair?{'&'.join(ENGINE)}&truth_share=0")
        yield remote, local
        remote.close()
        local.close()


def scrub(message: Message) -> Message:
    """Without what differs between any two processes."""
    for field, value in message.ListFields():
        if field.name in OWN:
            message.ClearField(field.name)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if isinstance(value, list) or hasattr(value, "add") else [value]:
                scrub(part)
    return message


def told(error: grpc.RpcError) -> tuple[str, str, list[bytes]]:
    metadata: Any = error.trailing_metadata() or ()
    details = [value for key, value in metadata if key == "grpc-status-details-bin"]
    return error.code().name, error.details() or "", [bytes(value) for value in details]


def outcome(call: Any) -> Any:
    """A reply, to the byte, or how the call failed: code, text and details."""
    try:
        reply = call()
    except grpc.RpcError as error:
        return told(error)
    if isinstance(reply, Reply):
        rows = [bytes(part) for item in range(len(reply.message.items)) for part in reply.rows_of(item)]
        return scrub(reply.message).SerializeToString(deterministic=True) + b"".join(rows)
    return None if reply is None else scrub(reply).SerializeToString(deterministic=True)


class Way:
    """A channel that keeps the row caches' versions, which each service draws for itself."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.versions: dict[tuple[str, int], int] = {}

    def unary(self, name: str, request: Any) -> Any:
        """The outcome."""
        if name != "Retrieve":
            return outcome(lambda: self.channel.unary(METHODS[name], request, 30))
        own = cache_pb2.RetrieveRequest.FromString(request.SerializeToString())
        for item in own.items:
            if item.query.cache_version == LAST_VERSION:
                item.query.cache_version = self.versions.get((item.session.session_id, item.query.layer), 0)
        return outcome(lambda: self.remember(own, self.channel.unary(METHODS[name], own, 30)))

    def remember(self, request: cache_pb2.RetrieveRequest, reply: Any) -> Any:
        """Keeps the versions of a reply."""
        for item, part in zip(request.items, reply.message.items, strict=True):
            if part.answer.cache_version:
                self.versions[item.session.session_id, item.query.layer] = part.answer.cache_version
        return reply


def different(method: Method, one: Any, other: Any) -> str:
    """The first lines in which two replies differ."""
    texts = [str(method.deserialize(end)) if isinstance(end, bytes) else str(end) for end in (one, other)]
    lines = [pair for pair in zip(*(text.splitlines() for text in texts), strict=False) if pair[0] != pair[1]]
    return f"{method.name}: {lines[:3]}"


class Requests:
    """Random requests for a few sessions, right and wrong."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.lengths: dict[str, list[int]] = {}

    def pick(self, *options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def ref(self) -> session_pb2.SessionRef:
        known = sorted(self.lengths)
        name = self.pick(*known) if known and self.rng.random() < 0.95 else self.pick("", "nobody", "x" * 129)
        return session_pb2.SessionRef(session_id=name, fingerprint=b"" if self.rng.random() < 0.98 else b"other")

    def tensor(self, *dims: int) -> tensor_pb2.Tensor:
        data = self.rng.standard_normal(dims, np.float32).tobytes()
        return tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_F32, dims=dims, data=data if self.rng.random() < 0.98 else b"!")

    def open(self) -> tuple[str, Message]:
        name = f"s{len(self.lengths)}" if self.rng.random() < 0.9 else "s0"
        options = session_pb2.SessionOptions(
            geometry=session_pb2.Geometry(
                layers=LAYERS,
                q_heads=Q_HEADS,
                kv_heads=KV_HEADS,
                head_dim=HEAD_DIM,
                value_dim=VALUE_DIM,
                dtype="DTYPE_F32",
            ),
            token_limit=self.pick(2048, 2048, 2048, 0),
            format=f"FORMAT_{self.pick(*FORMATS)}",
            maintenance="MAINTENANCE_MANUAL",
            rotation_seed=7,
            cache_slots=self.pick(0, 300, 600),
            selection=session_pb2.Selection(dense_below_tokens=self.pick(0, 64), k_tokens=32),
        )
        options.query_centroids.add(centroids=16, list_tokens=32)
        options.key_clusters.tokens_per_cluster = self.pick(0, 8)
        self.lengths.setdefault(name, [0] * LAYERS)
        return "OpenSession", cache_pb2.OpenSessionRequest(session_id=name, options=options)

    def chunk(self, ref: session_pb2.SessionRef, tokens: int, streams: bool = True) -> cache_pb2.Chunk:
        layer = int(self.rng.integers(LAYERS)) if self.rng.random() < 0.98 else 99
        first = 0
        if ref.session_id in self.lengths and layer < LAYERS:
            lengths = self.lengths[ref.session_id]
            first = max(lengths[layer] + self.pick(0, 0, 0, 0, 0, 0, 0, -1, 3), 0)
            if streams and first == lengths[layer]:
                lengths[layer] += tokens
        return cache_pb2.Chunk(
            layer=layer,
            first_position=first,
            keys=self.tensor(tokens, KV_HEADS, HEAD_DIM),
            values=self.tensor(tokens, KV_HEADS, VALUE_DIM),
            queries=self.tensor(min(tokens, 20), Q_HEADS, HEAD_DIM),
        )

    def append(self, streams: bool = False) -> tuple[str, cache_pb2.AppendRequest]:
        ref = self.ref()
        chunk = self.chunk(ref, int(self.rng.integers(1, 400)), streams)
        return "Append", cache_pb2.AppendRequest(session=ref, chunk=chunk, checksum=self.pick(0, 0, 0, 0, 0, 0, 1))

    def query(self, ref: session_pb2.SessionRef) -> cache_pb2.Query:
        layer = int(self.rng.integers(LAYERS))
        length = self.lengths.get(ref.session_id, [0] * LAYERS)[layer]
        positions = self.pick(1, 1, 3)
        selection = session_pb2.Selection(
            source=f"SOURCE_{self.pick(*SOURCES)}",
            k_tokens=self.pick(8, 32, 100, 9000 if self.rng.random() < 0.1 else 16),
        )
        query = cache_pb2.Query(
            layer=layer,
            position=max(length - positions + self.pick(0, 0, 0, 0, 5), 0),
            queries=self.tensor(positions, Q_HEADS, HEAD_DIM),
            selection=selection if self.rng.random() < 0.8 else None,
            cache_version=self.pick(0, LAST_VERSION, LAST_VERSION, 12345),
        )
        if self.rng.random() < 0.2:
            query.local_begin = max(length - 20, 0)
        return query

    def answer(self) -> cache_pb2.AnswerOptions:
        return cache_pb2.AnswerOptions(
            mode=cast("Any", int(self.rng.integers(7 if self.rng.random() < 0.1 else 6))),
            row_format=cast("Any", int(self.rng.integers(6 if self.rng.random() < 0.1 else 4))),
            remainder=bool(self.rng.random() < 0.05),
            explain=bool(self.rng.random() < 0.3),
        )

    def retrieve(self) -> tuple[str, Message]:
        refs = [self.ref() for _ in range(self.pick(1, 1, 2, 0))]
        items = [cache_pb2.RetrieveItem(session=ref, query=self.query(ref)) for ref in refs]
        return "Retrieve", cache_pb2.RetrieveRequest(items=items, answer=self.answer())

    def decode(self, sequence: int) -> cache_pb2.DecodeRequest:
        items = []
        for _ in range(self.pick(1, 1, 1, 2)):
            ref = self.ref()
            item = cache_pb2.DecodeItem(session=ref, chunk=self.chunk(ref, self.pick(1, 1, 4)))
            item.query.CopyFrom(self.query(ref))
            items.append(item)
        return cache_pb2.DecodeRequest(sequence=sequence, items=items, answer=self.answer())

    def manage(self) -> tuple[str, Message]:
        ref = self.ref()
        name, request = self.pick(
            ("GetSession", cache_pb2.GetSessionRequest(session=ref)),
            ("KeepAlive", cache_pb2.KeepAliveRequest(session=ref)),
            ("ListSessions", cache_pb2.ListSessionsRequest(page_size=self.pick(0, 1, 5000))),
            ("MaintainSession", cache_pb2.MaintainSessionRequest(session=ref, layers=self.pick([], [0], [5]))),
            ("TruncateSession", cache_pb2.TruncateSessionRequest(session=ref, length=self.pick(0, 100, 5000))),
            ("CloseSession", cache_pb2.CloseSessionRequest(session=ref)),
        )
        return name, request

    def after(self, name: str, request: Any, result: Any) -> None:
        """What requests to come should reckon with."""
        session = getattr(request, "session", None)
        if session is None or session.session_id not in self.lengths:
            return
        if name == "Append" and request.chunk.layer < LAYERS:
            if not isinstance(result, tuple):
                self.lengths[session.session_id][request.chunk.layer] = METHODS[name].deserialize(result).length
        elif isinstance(result, tuple):
            return
        elif name == "CloseSession":
            del self.lengths[session.session_id]
        elif name == "TruncateSession":
            lengths = self.lengths[session.session_id]
            self.lengths[session.session_id] = [min(length, request.length) for length in lengths]


def test_random_calls_have_the_same_outcome_to_the_byte(
    pair: tuple[Channel, Channel], rng: np.random.Generator
) -> None:
    requests, ways = Requests(rng), [Way(channel) for channel in pair]
    kinds = (requests.append, requests.append, requests.retrieve, requests.retrieve, requests.retrieve, requests.manage)
    answered = refused = 0
    for number in range(600):
        name, request = requests.open() if number < 4 or rng.random() < 0.02 else requests.pick(*kinds)()
        remote, local = (way.unary(name, request) for way in ways)
        assert remote == local, different(METHODS[name], remote, local)
        requests.after(name, request, remote)
        answered, refused = answered + (not isinstance(remote, tuple)), refused + isinstance(remote, tuple)
    assert answered > 50, answered
    assert refused > 50, refused


def test_random_streams_have_the_same_outcome_to_the_byte(
    pair: tuple[Channel, Channel], rng: np.random.Generator
) -> None:
    requests = Requests(rng)
    for _ in range(3):
        name, opening = requests.open()
        assert outcome(lambda: pair[0].unary(METHODS[name], opening, 30)) == outcome(  # noqa: B023
            lambda: pair[1].unary(METHODS[name], opening, 30)  # noqa: B023
        )
    for _ in range(12):
        chunks = [requests.append(streams=True)[1] for _ in range(int(rng.integers(4)))]
        uploads = [outcome(lambda way=way: way.upload(METHODS["AppendStream"], iter(chunks), 30)) for way in pair]  # noqa: B023
        assert uploads[0] == uploads[1]
    for _ in range(12):
        messages = [requests.decode(number + 1) for number in range(40)]
        if rng.random() < 0.3:
            messages[int(rng.integers(40))] = cache_pb2.DecodeRequest()
        ends = [read_all(way, messages) for way in pair]
        assert ends[0] == ends[1]


def read_all(way: Channel, messages: list[cache_pb2.DecodeRequest]) -> list[Any]:
    stream = way.stream(METHODS["Decode"], 30)
    for message in messages:
        stream.write(message)
    stream.done_writing()
    results = [outcome(stream.read)]
    while isinstance(results[-1], bytes):
        results.append(outcome(stream.read))
    return results


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"AppendStream", "Decode", "GetServerInfo"}))
def test_every_call_of_the_contract_is_served_alike(pair: tuple[Channel, Channel], name: str) -> None:
    request_class = cache_pb2.DESCRIPTOR.services_by_name["Cache"].methods_by_name[name].input_type._concrete_class
    for request in (request_class(), with_session(request_class())):
        remote, local = (outcome(lambda way=way: way.unary(METHODS[name], request, 30)) for way in pair)  # noqa: B023
        assert remote == local


def with_session(request: Any) -> Any:
    if "session" in request.DESCRIPTOR.fields_by_name:
        request.session.session_id = "nobody"
    return request


def test_limits_and_device_are_the_same(pair: tuple[Channel, Channel]) -> None:
    infos = [way.unary(METHODS["GetServerInfo"], cache_pb2.GetServerInfoRequest(), 30) for way in pair]
    assert infos[0].limits == infos[1].limits
    assert (infos[0].device, infos[0].version) == (infos[1].device, infos[1].version)


# ---- Its life --------------------------------------------------------------------------------------------------------


def test_one_engine_for_a_name_from_the_first_client_to_the_last() -> None:
    with ctkvr.connect("embedded://life?lanes=1&arena_bytes=16MiB") as first:
        boot_id = first.server_info().header.boot_id
        with ctkvr.connect("embedded://life") as second, ctkvr.connect("embedded://other?arena_bytes=16MiB") as third:
            assert second.server_info().header.boot_id == boot_id
            assert third.server_info().header.boot_id != boot_id
        with ctkvr.connect("embedded://life") as second:
            session = second.open_session(**{**GEOMETRY, "token_limit": 64})
        assert [entry.session_id for entry in first.list_sessions()] == [session.id]
    with ctkvr.connect("embedded://life?arena_bytes=16MiB") as after:
        assert after.server_info().header.boot_id != boot_id
        assert after.list_sessions() == []
        with pytest.raises(ValueError, match="client is closed"):
            first.server_info()


def test_it_is_the_default(loop: asyncio.AbstractEventLoop) -> None:
    with ctkvr.connect() as client, ctkvr.connect("embedded://") as same:
        assert client.server_info().header.boot_id == same.server_info().header.boot_id

    async def boot_id() -> int:
        async with await ctkvr.aio.connect() as twin:
            return (await twin.server_info()).header.boot_id

    with ctkvr.connect() as client:
        assert loop.run_until_complete(boot_id()) == client.server_info().header.boot_id


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("embedded://?lanes=many", 'lanes is "many"; it must be a whole number, 0 or 1 to 256'),
        ("embedded://?listen_address=a:1", '"listen_address" is no setting of an engine; those are'),
        ("embedded://?arena_bytes=1", "arena_bytes"),
        ("embedded://?lanes=1&lanes=2", "each once"),
        ("embedded://a/b", "is expected"),
        ("embedded://small?lanes=2", "is open with settings"),
    ],
)
def test_wrong_addresses_are_told_apart(address: str, text: str) -> None:
    with ctkvr.connect(SMALL_ENGINE), pytest.raises(ValueError, match="address is") as raised:
        ctkvr.connect(address)
    assert text in str(raised.value)


def test_credentials_are_for_servers() -> None:
    with pytest.raises(ValueError, match="are for a server"):
        ctkvr.connect(credentials=grpc.ssl_channel_credentials())


def test_a_time_out_that_is_over_is_one(tokens: Tokens) -> None:
    with ctkvr.connect(SMALL_ENGINE) as client, client.open_session(**GEOMETRY) as session:
        with pytest.raises(errors.DeadlineExceeded):
            session.append(0, tokens.keys, tokens.values, timeout=1e-9)
        assert session.info().layers[0].length == 0
        stream = session.decode(timeout=1e-9)
        with pytest.raises(errors.DeadlineExceeded):
            stream.step(0, tokens.keys[0], tokens.values[0])


def test_a_stream_that_is_cancelled_says_so(tokens: Tokens) -> None:
    with ctkvr.connect(SMALL_ENGINE) as client, client.open_session(**GEOMETRY) as session:
        stream = session.decode()
        stream.step(0, tokens.keys[0], tokens.values[0])
        stream.cancel()
        with pytest.raises(errors.Cancelled):
            stream.send(ctkvr.Step(0, tokens.keys[1], tokens.values[1]))


def test_closing_a_client_wakes_who_waits(loop: asyncio.AbstractEventLoop) -> None:
    async def wait_and_close() -> object:
        client = await ctkvr.aio.connect(SMALL_ENGINE)
        channel = client.runner.channel
        stream = channel.stream(METHODS["Decode"], None)
        reading = asyncio.ensure_future(stream.read())  # nothing was written: it waits
        await asyncio.sleep(0)
        await client.close()
        return (await asyncio.gather(reading, return_exceptions=True))[0]

    failure = loop.run_until_complete(wait_and_close())
    assert isinstance(failure, grpc.RpcError)
    assert failure.code() is grpc.StatusCode.CANCELLED


def test_threads_share_a_client(tokens: Tokens) -> None:
    failures: list[BaseException] = []

    def work(client: Any) -> None:
        try:
            with client.open_session(**GEOMETRY, format="f32") as session:
                for token in range(60):
                    session.append(0, tokens.keys[token], tokens.values[token])
                    answer = session.retrieve(0, tokens.queries[token], row_format="f32", source="exact")
                    assert np.array_equal(answer.keys[0, 1], tokens.keys[: token + 1, 1])
        except BaseException as error:
            failures.append(error)

    with ctkvr.connect(SMALL_ENGINE) as client:
        threads = [threading.Thread(target=work, args=(client,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def run_apart(program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CTKVR_TEST_SEED": str(SEED)}
    return subprocess.run(
        # From 3.12 on Python warns of forks beside threads.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment,
    )


SMALL_SESSION = """
import os, sys
import numpy as np, ctkvr
client = ctkvr.connect("embedded://?arena_bytes=16MiB&lanes=2")
session = client.open_session(layers=1, q_heads=2, kv_heads=2, head_dim=32, dtype="float32", token_limit=512)
tokens = np.ones((64, 2, 32), np.float32)
"""


def test_a_program_may_end_with_work_in_flight() -> None:
    done = run_apart(
        SMALL_SESSION
        + "stream = session.decode()\n"
        + "for token in range(40): stream.send(ctkvr.Step(0, tokens[token], tokens[token]))\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_fork_leaves_the_engine_to_its_parent() -> None:
    done = run_apart(
        SMALL_SESSION
        + """
child = os.fork()
if child == 0:
    try:
        session.append(0, tokens, tokens)
    except RuntimeError as error:
        print(error, flush=True)
    with ctkvr.connect("embedded://?arena_bytes=16MiB") as own:
        print(len(own.list_sessions()), flush=True)
    del client, session
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(session.append(0, tokens, tokens).length)
"""
    )
    assert done.stderr == ""
    assert "before the process forked; call ctkvr.connect() in the child\n0\n64\n" in done.stdout


# ---- The module ------------------------------------------------------------------------------------------------------


def test_the_stub_names_what_the_module_has() -> None:
    stub = (Path(ctkvr.__file__).parent / "_engine.pyi").read_text()
    for kind in (_engine.Notifier, _engine.Pending, _engine.Upload, _engine.Stream, _engine.Engine):
        assert f"class {kind.__name__}:" in stub
        for name in vars(kind):
            assert name.startswith("_") or f"    def {name}(" in stub, f"{kind.__name__}.{name}"
    assert {name for name in vars(_engine) if not name.startswith("_")} == {
        "Engine", "Notifier", "Pending", "Stream", "Upload", "open",
    }  # fmt: skip


def test_the_module_shows_nothing_of_the_engine_and_brings_all_it_needs() -> None:
    module = Path(_engine.__file__)
    shown = subprocess.run(["nm", "-D", "--defined-only", module], capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in shown.stdout.splitlines()] == ["PyInit__engine"]
    for library in (module, module.with_name("libprotobuf-ctkvr.so")):
        needed = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
        for line in needed.splitlines():
            if any(name in line for name in ("protobuf", "absl", "xxhash")):
                assert str(module.parent.parent) in line, line


def test_other_versions_of_protobuf_may_be_in_the_process() -> None:
    """The compiler of grpc_tools carries one whose symbols are unique in the process."""
    for program in ("import grpc_tools.protoc\n" + SMALL_SESSION, SMALL_SESSION + "import grpc_tools.protoc\n"):
        done = run_apart(program + "print(session.append(0, tokens, tokens).length)")
        assert (done.returncode, done.stdout, done.stderr) == (0, "64\n", "")


def test_a_client_of_servers_loads_neither_engine_nor_torch() -> None:
    done = run_apart("import sys, ctkvr, ctkvr.aio\nprint(sorted({'torch', 'ctkvr._engine'} & set(sys.modules)))")
    assert done.stdout == "[]\n", done.stderr
