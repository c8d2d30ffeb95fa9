"""A gRPC server on a Unix socket that answers with given bytes, by the server's side of the same HTTP/2 library."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import ProtocolError

from nodeagent.cri.protobuf import encode


class Failure(NamedTuple):
    """An answer that is an error."""

    code: int
    message: str


Answer = Callable[[bytes], "bytes | Failure"]
"""Takes the request's message."""


class CriServer:
    """Serves until it is closed. `calls` has each (method, request) in order."""

    def __init__(self, path: Path, answers: dict[str, Answer]) -> None:
        self.path = str(path)
        self.calls: list[tuple[str, bytes]] = []
        self.delay_s = 0.0
        self._answers = answers
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._connections:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                with connection, contextlib.suppress(OSError, ProtocolError):
                    self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        http = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        http.initiate_connection()
        connection.sendall(http.data_to_send())
        methods: dict[int, str] = {}
        bodies: dict[int, bytes] = {}
        waiting: dict[int, bytes] = {}
        while data := connection.recv(65536):
            for event in http.receive_data(data):
                if isinstance(event, events.RequestReceived):
                    methods[event.stream_id] = next(str(value) for name, value in event.headers if str(name) == ":path")
                elif isinstance(event, events.DataReceived):
                    bodies[event.stream_id] = bodies.get(event.stream_id, b"") + event.data
                    # Else the window of the connection would end after some hundred requests; gRPC's server renews it.
                    http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, events.StreamEnded):
                    self._answer(http, event.stream_id, methods[event.stream_id], bodies[event.stream_id], waiting)
            for stream in list(waiting):
                self._send_body(http, stream, waiting)
            connection.sendall(http.data_to_send())

    def _answer(self, http: H2Connection, stream: int, method: str, body: bytes, waiting: dict[int, bytes]) -> None:
        time.sleep(self.delay_s)
        request = body[5:]
        self.calls.append((method, request))
        found = self._answers.get(method)
        answer = found(request) if found is not None else Failure(12, f"unknown method {method.rpartition('/')[2]}")
        headers = [(":status", "200"), ("content-type", "application/grpc")]
        if isinstance(answer, Failure):
            status = [("grpc-status", str(answer.code)), ("grpc-message", quote(answer.message, safe=" "))]
            http.send_headers(stream, headers + status, end_stream=True)
            return
        http.send_headers(stream, headers)
        waiting[stream] = struct.pack(">?I", False, len(answer)) + answer

    def _send_body(self, http: H2Connection, stream: int, waiting: dict[int, bytes]) -> None:
        """As much as the client's window allows."""
        while body := waiting[stream]:
            size = min(len(body), http.local_flow_control_window(stream), http.max_outbound_frame_size)
            if size == 0:
                return
            http.send_data(stream, body[:size])
            waiting[stream] = body[size:]
        del waiting[stream]
        http.send_headers(stream, [("grpc-status", "0")], end_stream=True)


@contextlib.contextmanager
def serving(path: Path, answers: dict[str, Answer]) -> Iterator[CriServer]:
    """A server at this path."""
    server = CriServer(path, answers)
    try:
        yield server
    finally:
        server.close()


def container_status(id_: str, *, state: int = 1, mounted: Sequence[str] = ()) -> bytes:
    """What containerd 2 answers to ContainerStatus for a container with a plain volume and these images as volumes. It
    adds the path of the mounted snapshot to the kubelet's mount."""
    mounts = encode(1, "/data") + encode(2, "/var/lib/kubelet/pods/u/volumes/data")
    fields = [encode(1, id_), encode(2, encode(1, "main")), encode(3, state), encode(14, mounts)]
    for number, image in enumerate(mounted):
        path = f"/run/containerd/io.containerd.grpc.v1.cri/image-volumes/s1/{number}"
        spec = encode(1, image) + encode(18, "registry.example/models/llama:1")
        fields.append(encode(14, encode(1, f"/models/{number}") + encode(2, path) + encode(3, 1) + encode(9, spec)))
    return encode(1, b"".join(fields))
