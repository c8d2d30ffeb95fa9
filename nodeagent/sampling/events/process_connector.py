"""Receives every fork and every new thread of the machine from the kernel's process connector (CONFIG_PROC_EVENTS).

pyroute2 opens and binds the socket and encodes its control messages. `recvmmsg` then reads the events into one buffer,
because `ProcEventSocket.get()` costs 38% of a core at 5,000 forks/s and fails at 23,000 (performance.md R3). A batch
with every event attributed to its pod costs 0.9 us per event, as much as one `recv` per event alone
(benchmarks/forks.py).

Promises:

1. The socket receives only forks: a classic BPF filter drops exec, exit and other events before they are queued.
2. No event is lost without a count. The kernel counts each event that does not fit the receive buffer: after an overrun
   the pods of these events are unknown, but their number is exact.
3. If the kernel does not reply, `open_connector` fails with the reason within `_ACK_TIMEOUT_S`. The kernel ignores
   listeners in other PID and user namespaces.
4. pyroute2's asyncio loop is closed before `open_connector` returns: none of its descriptors, threads and signal
   handlers stays.
"""

import contextlib
import ctypes
import errno
import importlib
import importlib.util
import os
import select
import socket
import struct
import sys
import types
from typing import Any, Final, NamedTuple, Protocol

_NAMESPACES: Final = (("pid", 0xEFFFFFFC, "hostPID: true"), ("user", 0xEFFFFFFD, "hostUsers: true"))
"""Inode numbers of the initial namespaces (include/linux/proc_ns.h), which never change, and the pod field for each."""
_ACK_TIMEOUT_S: Final = 0.5
"""The kernel replies to a control message before its `send` returns; the rest is reserve."""
_SO_RCVBUFFORCE: Final = 33
_SO_ATTACH_FILTER: Final = 26
_SO_MEMINFO: Final = 55
_MEMINFO_DROPS: Final = 8
_RECEIVE_BUFFER: Final = 4 << 20
"""The kernel doubles it. A queued event takes 832 bytes: 10,000 events, 0.4 s of the fastest storm measured (23,000/s),
or four drains at `fork_meter.STORM_DRAIN_S`. Only queued events use memory."""

_BATCH: Final = 512
"""Events of one system call: 39 KiB of buffer."""
_MAX_BATCHES: Final = 64
"""Batches of one drain, so that a storm faster than the reads cannot block the loop."""
_MESSAGE_BYTES: Final = 76
"""nlmsghdr 16, cn_msg 20, proc_event 40 (include/uapi/linux/cn_proc.h)."""
_WORDS: Final = _MESSAGE_BYTES // 4
_ACK, _WHAT, _PARENT_TGID, _CHILD_PID, _CHILD_TGID, _ERROR = 7, 9, 14, 15, 16, 13
"""Offsets in 32-bit words. A reply has `_ERROR` where a fork has the parent's thread."""
_NONE, _FORK = 0, 1
_LISTEN, _IGNORE = 1, 2

# Load the word `what`; accept FORK and NONE (a reply); drop the rest. BPF loads big-endian.
_FILTER: Final = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in (
        (0x20, 0, 0, 4 * _WHAT),
        (0x15, 1, 0, socket.htonl(_FORK)),
        (0x15, 0, 1, socket.htonl(_NONE)),
        (0x06, 0, 0, 0xFFFFFFFF),
        (0x06, 0, 0, 0),
    )
)


class ConnectorError(Exception):
    """The process connector cannot be used. The message has the reason and the remedy."""


class ForkBatch(NamedTuple):
    """The events since the last drain, oldest first."""

    parents: list[int]
    """For each new process: the process that forked."""
    children: list[int]
    """For each new process: its PID."""
    owners: list[int]
    """For each new thread: its process."""
    lost: int
    """Forks and threads that did not fit the buffer."""


class Pyroute2Parts(NamedTuple):
    """The parts of pyroute2 that are used."""

    socket: Any
    """`ProcEventSocket`."""
    control: Any
    """`proc_event_control`."""
    light: bool
    """`pyroute2/__init__.py`, which imports the whole package, was not executed."""


class Pyroute2Socket(Protocol):
    """The part of `ProcEventSocket` that is used."""

    def setsockopt(self, level: int, name: int, value: int | bytes) -> None: ...
    def bind(self) -> None: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


def import_pyroute2() -> Pyroute2Parts:
    """Import the process connector of pyroute2 alone: 17 ms and 2.4 MiB in an agent with its API transport, instead of
    70 ms and 12 MiB for the whole package. A release that cannot be imported that way is imported completely.

    Raises ImportError if the package is not installed.
    """
    if "pyroute2" not in sys.modules:
        try:
            with _bare_parent():
                return _collect(light=True)
        except (ImportError, AttributeError, TypeError):
            for name in [name for name in sys.modules if name.partition(".")[0] == "pyroute2"]:
                del sys.modules[name]
    return _collect(light=False)


def _collect(*, light: bool) -> Pyroute2Parts:
    module = importlib.import_module("pyroute2.netlink.connector.cn_proc")
    return Pyroute2Parts(module.ProcEventSocket, module.proc_event_control, light)


@contextlib.contextmanager
def _bare_parent() -> Any:
    """Replace the parent package by a module object that contains only its directory (see
    kube/kubernetes_client.py)."""
    spec = importlib.util.find_spec("pyroute2")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the pyroute2 package is not installed")
    bare = types.ModuleType("pyroute2")
    bare.__path__ = list(spec.submodule_search_locations)
    sys.modules["pyroute2"] = bare
    try:
        yield
    finally:
        if sys.modules.get("pyroute2") is bare:
            del sys.modules["pyroute2"]


def open_connector(*, pyroute2: Pyroute2Parts | None = None, receive_buffer: int = _RECEIVE_BUFFER) -> "Connector":
    """A socket that receives the machine's forks. Raises ConnectorError."""
    missing = [field for name, inode, field in _NAMESPACES if _namespace(name) not in (inode, None)]
    if missing:
        raise ConnectorError(f"the process connector works only in the host's namespaces: needs {', '.join(missing)}")
    try:
        parts = pyroute2 or import_pyroute2()
    except ImportError as error:
        raise ConnectorError(str(error)) from error
    try:
        listening = _listen(parts, receive_buffer)
    except KeyError as error:
        # pyroute2 tries 180 addresses after any error, and then reports that none is free.
        raise ConnectorError("the process connector cannot be bound: needs CAP_NET_ADMIN") from error
    except OSError as error:
        raise ConnectorError(_refusal(error)) from error
    return Connector(listening, ignore=_control(parts, _IGNORE, nonce=0))


def _listen(parts: Pyroute2Parts, receive_buffer: int) -> socket.socket:
    """A socket that the kernel sends events to. Raises OSError."""
    source: Pyroute2Socket = parts.socket()
    try:
        source.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _program(_FILTER))
        try:
            source.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, receive_buffer)
        except PermissionError:
            source.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)  # up to net.core.rmem_max
        source.bind()
        # The duplicate stays bound. The rest of pyroute2's socket, an event loop with three descriptors, is closed.
        listening = socket.socket(fileno=os.dup(source.fileno()))
    finally:
        source.close()
    try:
        listening.setblocking(False)
        nonce = int.from_bytes(os.urandom(3))
        listening.send(_control(parts, _LISTEN, nonce=nonce))
        _await_ack(listening, nonce)
    except OSError:
        listening.close()
        raise
    return listening


def _control(parts: Pyroute2Parts, action: int, *, nonce: int) -> bytes:
    message = parts.control()
    message["action"], message["idx"], message["val"] = action, 1, 1
    message["len"], message["ack"] = 4, nonce
    message["header"]["type"], message["header"]["flags"] = 3, 0  # NLMSG_DONE, as the connector's documents have it
    message["header"]["sequence_number"], message["header"]["pid"] = 0, os.getpid()
    message.reset()
    message.encode()
    return bytes(message.data)


def _await_ack(listening: socket.socket, nonce: int) -> None:
    """Read until the reply with this number; drop the forks before it. Raises OSError."""
    poll = select.poll()  # select.select takes no descriptor above 1023
    poll.register(listening, select.POLLIN)
    while poll.poll(_ACK_TIMEOUT_S * 1000):
        with contextlib.suppress(BlockingIOError):
            while data := listening.recv(_MESSAGE_BYTES):
                words = struct.unpack(f"{_WORDS}I", data) if len(data) == _MESSAGE_BYTES else (_FORK,) * _WORDS
                if words[_WHAT] == _NONE and words[_ACK] == nonce + 1:
                    if words[_ERROR]:
                        raise OSError(words[_ERROR], os.strerror(words[_ERROR]))
                    return
    raise TimeoutError(errno.ETIMEDOUT, "no reply from the kernel")


def _refusal(error: OSError) -> str:
    if error.errno == errno.ECONNREFUSED:
        return "the process connector exists only in the host's network namespace: needs hostNetwork: true"
    if error.errno in (errno.EPERM, errno.EACCES):
        return "the process connector needs CAP_NET_ADMIN"
    if error.errno == errno.EPROTONOSUPPORT:
        return "this kernel has no connector (CONFIG_CONNECTOR)"
    if error.errno == errno.ETIMEDOUT:
        return "no reply from the kernel: no CONFIG_PROC_EVENTS, or not in the host's namespaces"
    return f"no process connector: {error.strerror}"


def _namespace(name: str) -> int | None:
    try:
        return os.stat(f"/proc/self/ns/{name}").st_ino
    except OSError:
        return None  # this kernel has only the initial namespace


def _program(code: bytes) -> bytes:
    """A struct sock_fprog. The kernel copies the code during setsockopt; `_FILTER` outlives that."""
    address = ctypes.cast(ctypes.c_char_p(code), ctypes.c_void_p).value
    return struct.pack("HP", len(code) // 8, address)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Header(ctypes.Structure):
    """struct msghdr."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("vectors", ctypes.POINTER(_IoVec)),
        ("vector_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


class _Message(ctypes.Structure):
    """struct mmsghdr."""

    _fields_ = (("header", _Header), ("received", ctypes.c_uint32))


class Connector:
    """A socket that receives the machine's forks."""

    def __init__(self, listening: socket.socket, *, ignore: bytes) -> None:
        self._socket = listening
        self._ignore = ignore
        self._lost = self._dropped()
        self._receive = ctypes.CDLL(None, use_errno=True).recvmmsg
        self._buffer = bytearray(_BATCH * _MESSAGE_BYTES)
        self._words = memoryview(self._buffer).cast("I")
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._vectors = (_IoVec * _BATCH)(*[_IoVec(first + i * _MESSAGE_BYTES, _MESSAGE_BYTES) for i in range(_BATCH)])
        self._messages = (_Message * _BATCH)()
        for message, vector in zip(self._messages, self._vectors, strict=True):
            message.header.vectors, message.header.vector_count = ctypes.pointer(vector), 1

    def fileno(self) -> int:
        """Readable if events are pending."""
        return self._socket.fileno()

    def drain(self) -> ForkBatch:
        """Read all pending events without waiting."""
        forks = ForkBatch([], [], [], 0)
        for _ in range(_MAX_BATCHES):
            number = self._receive(self.fileno(), self._messages, _BATCH, socket.MSG_DONTWAIT, None)
            if number < 0:
                if ctypes.get_errno() in (errno.ENOBUFS, errno.EINTR):
                    continue  # ENOBUFS: events were lost, `_dropped` counts them; queued events can still be read
                break
            self._add_events(number, forks)
            if number < _BATCH:
                break
        before, self._lost = self._lost, self._dropped()
        return forks._replace(lost=(self._lost - before) & 0xFFFFFFFF)

    def close(self) -> None:
        """Unsubscribe and close. Kernels before 6.6 produce events until the last listener unsubscribes."""
        with contextlib.suppress(OSError):  # then the close must suffice
            self._socket.send(self._ignore)
        self._socket.close()

    def _add_events(self, number: int, forks: ForkBatch) -> None:
        end = number * _WORDS
        parents, children, groups = (
            self._words[offset:end:_WORDS].tolist() for offset in (_PARENT_TGID, _CHILD_PID, _CHILD_TGID)
        )
        kinds = self._words[_WHAT:end:_WORDS].tolist()
        if kinds.count(_FORK) == number and children == groups:  # processes only: the usual storm
            forks.parents.extend(parents)
            forks.children.extend(children)
            return
        for kind, parent, child, group in zip(kinds, parents, children, groups, strict=True):
            if kind != _FORK:
                continue
            if child == group:
                forks.parents.append(parent)
                forks.children.append(child)
            else:
                # For a thread the kernel reports the parent of its process, which is not the creator.
                forks.owners.append(group)

    def _dropped(self) -> int:
        """All events that the kernel could not queue, modulo 2^32."""
        info = self._socket.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 64)
        return int(struct.unpack_from("I", info, 4 * _MEMINFO_DROPS)[0])
