"""The kernel's process connector (CONFIG_PROC_EVENTS): every fork and every new thread of the machine, as it happens.

pyroute2 opens and binds the socket and encodes its control messages; what then arrives is taken by `recvmmsg` into one
buffer, because `ProcEventSocket.get()` costs 38% of a core at 5,000 forks/s and breaks at 23,000 (MEASURED.md). Batches
with every event charged to its pod cost what one `recv` for each costs with nothing done, 0.9 us an event
(benchmarks/forks.py).

Promises:

1. Only forks reach us: a classic BPF filter in the kernel drops exec, exit and the rest before they are queued.
2. Nothing is lost in silence. What does not fit the receive buffer is counted by the kernel, by the event, and read
   from there: an overrun makes the events anonymous, not the number wrong.
3. A kernel that will not answer (it ignores listeners of other PID and user namespaces without a word) is refused
   within `_ANSWER_S`, with the reason.
4. pyroute2's asyncio loop is closed before `open_connector` returns: no descriptor, thread or signal handler of it
   stays.
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
"""Inode numbers of the initial namespaces (include/linux/proc_ns.h), which never change, and how a pod gets them."""
_ANSWER_S: Final = 0.5
"""The kernel answers a control message before the `send` that carries it returns; the rest is patience."""
_SO_RCVBUFFORCE: Final = 33
_SO_ATTACH_FILTER: Final = 26
_SO_MEMINFO: Final = 55
_MEMINFO_DROPS: Final = 8
_RECEIVE_BUFFER: Final = 4 << 20
"""The kernel doubles it. A queued event takes 832 bytes of it: 10,000 events, 0.4 s of the fastest storm measured
(23,000/s), or four looks of a loop that comes every 0.1 s. It is a limit: memory is only taken by what is queued."""

_BATCH: Final = 512
"""Events for one system call: 39 KiB of buffer."""
_ROUNDS: Final = 64
"""Batches in one drain, so that a storm faster than we read cannot hold the loop."""
_SIZE: Final = 76
"""nlmsghdr 16, cn_msg 20, proc_event 40 (include/uapi/linux/cn_proc.h)."""
_WORDS: Final = _SIZE // 4
_ACK, _WHAT, _PARENT_TGID, _CHILD_PID, _CHILD_TGID, _ERROR = 7, 9, 14, 15, 16, 13
"""Offsets in 32-bit words. For an answer `_ERROR` is where a fork has the parent's thread."""
_NONE, _FORK = 0, 1
_LISTEN, _IGNORE = 1, 2

# load the word `what`; accept it when it is FORK or NONE (an answer); else drop. BPF loads big-endian.
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
    """This host does not let us listen; the message says why and what would."""


class ForkBatch(NamedTuple):
    """What happened since the last drain, oldest first."""

    parents: list[int]
    """The process that forked, for each new process."""
    children: list[int]
    """The new process, for each."""
    owners: list[int]
    """The process that has it, for each new thread."""
    lost: int
    """Forks and threads that did not fit the buffer."""


class Pyroute2Parts(NamedTuple):
    """What of pyroute2 is used."""

    socket: Any
    """`ProcEventSocket`."""
    control: Any
    """`proc_event_control`."""
    light: bool
    """`pyroute2/__init__.py`, which imports all of it, was not executed."""


class Pyroute2Socket(Protocol):
    """The part of `ProcEventSocket` that is used."""

    def setsockopt(self, level: int, name: int, value: int | bytes) -> None: ...
    def bind(self) -> None: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


def load() -> Pyroute2Parts:
    """Import the process connector of pyroute2 alone: 17 ms and 2.4 MiB in an agent that has its API transport loaded,
    where the whole package is 70 ms and 12 MiB. A release that does not import that way is imported whole.

    Raises ImportError when the package is not installed.
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
    """A module object that only knows its directory stands in for the parent package (see cluster/official.py)."""
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


def open_connector(*, official: Pyroute2Parts | None = None, receive_buffer: int = _RECEIVE_BUFFER) -> "Connector":
    """Listen to the machine's forks. Raises ConnectorError where that is not possible."""
    foreign = [means for name, inode, means in _NAMESPACES if _namespace(name) not in (inode, None)]
    if foreign:
        raise ConnectorError(f"the process connector only tells the host's own namespaces: needs {', '.join(foreign)}")
    try:
        parts = official or load()
    except ImportError as error:
        raise ConnectorError(str(error)) from error
    try:
        listening = _listen(parts, receive_buffer)
    except KeyError as error:
        # pyroute2 tries 180 addresses, whatever the kernel says, and then tells that none is free.
        raise ConnectorError("the process connector cannot be bound: needs CAP_NET_ADMIN") from error
    except OSError as error:
        raise ConnectorError(_refusal(error)) from error
    return Connector(listening, ignore=_control(parts, _IGNORE, nonce=0))


def _listen(parts: Pyroute2Parts, receive_buffer: int) -> socket.socket:
    """A socket that the kernel has begun to send to. Raises OSError."""
    theirs: Pyroute2Socket = parts.socket()
    try:
        theirs.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _program(_FILTER))
        try:
            theirs.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, receive_buffer)
        except PermissionError:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)  # up to net.core.rmem_max
        theirs.bind()
        # The description stays bound; everything else of theirs, an event loop with three descriptors, goes.
        ours = socket.socket(fileno=os.dup(theirs.fileno()))
    finally:
        theirs.close()
    try:
        ours.setblocking(False)
        nonce = int.from_bytes(os.urandom(3))
        ours.send(_control(parts, _LISTEN, nonce=nonce))
        _await_answer(ours, nonce)
    except OSError:
        ours.close()
        raise
    return ours


def _control(parts: Pyroute2Parts, action: int, *, nonce: int) -> bytes:
    message = parts.control()
    message["action"], message["idx"], message["val"] = action, 1, 1
    message["len"], message["ack"] = 4, nonce
    message["header"]["type"], message["header"]["flags"] = 3, 0  # NLMSG_DONE, as the connector's documents have it
    message["header"]["sequence_number"], message["header"]["pid"] = 0, os.getpid()
    message.reset()
    message.encode()
    return bytes(message.data)


def _await_answer(listening: socket.socket, nonce: int) -> None:
    """Read until the answer with our number; forks meanwhile are forgotten. Raises OSError."""
    while select.select([listening], [], [], _ANSWER_S)[0]:
        with contextlib.suppress(BlockingIOError):
            while data := listening.recv(_SIZE):
                words = struct.unpack(f"{_WORDS}I", data) if len(data) == _SIZE else (_FORK,) * _WORDS
                if words[_WHAT] == _NONE and words[_ACK] == nonce + 1:
                    if words[_ERROR]:
                        raise OSError(words[_ERROR], os.strerror(words[_ERROR]))
                    return
    raise TimeoutError(errno.ETIMEDOUT, "the kernel does not answer")


def _refusal(error: OSError) -> str:
    if error.errno == errno.ECONNREFUSED:
        return "the process connector is only in the host's network namespace: needs hostNetwork: true"
    if error.errno in (errno.EPERM, errno.EACCES):
        return "the process connector needs CAP_NET_ADMIN"
    if error.errno == errno.EPROTONOSUPPORT:
        return "this kernel has no connector (CONFIG_CONNECTOR)"
    if error.errno == errno.ETIMEDOUT:
        return "the kernel does not answer: no CONFIG_PROC_EVENTS, or a namespace of our own"
    return f"no process connector: {error.strerror}"


def _namespace(name: str) -> int | None:
    try:
        return os.stat(f"/proc/self/ns/{name}").st_ino
    except OSError:
        return None  # no such namespaces on this kernel: there is only the initial one


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
    """A listening socket."""

    def __init__(self, listening: socket.socket, *, ignore: bytes) -> None:
        self._socket = listening
        self._ignore = ignore
        self._lost = self._dropped()
        self._receive = ctypes.CDLL(None, use_errno=True).recvmmsg
        self._buffer = bytearray(_BATCH * _SIZE)
        self._words = memoryview(self._buffer).cast("I")
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._vectors = (_IoVec * _BATCH)(*[_IoVec(first + i * _SIZE, _SIZE) for i in range(_BATCH)])
        self._messages = (_Message * _BATCH)()
        for message, vector in zip(self._messages, self._vectors, strict=True):
            message.header.vectors, message.header.vector_count = ctypes.pointer(vector), 1

    def fileno(self) -> int:
        """Readable when there is something to drain."""
        return self._socket.fileno()

    def drain(self) -> ForkBatch:
        """Take what is there, without waiting."""
        forks = ForkBatch([], [], [], 0)
        for _ in range(_ROUNDS):
            number = self._receive(self.fileno(), self._messages, _BATCH, socket.MSG_DONTWAIT, None)
            if number < 0:
                if ctypes.get_errno() in (errno.ENOBUFS, errno.EINTR):
                    continue  # ENOBUFS: some were lost, which `_dropped` counts; what is queued can still be read
                break
            self._sort(number, forks)
            if number < _BATCH:
                break
        before, self._lost = self._lost, self._dropped()
        return forks._replace(lost=(self._lost - before) & 0xFFFFFFFF)

    def close(self) -> None:
        """Stop listening; kernels before 6.6 go on making events for nobody until they are told."""
        with contextlib.suppress(OSError):  # closing the socket is all that is left to do then
            self._socket.send(self._ignore)
        self._socket.close()

    def _sort(self, number: int, forks: ForkBatch) -> None:
        end = number * _WORDS
        parents, children, groups = (
            self._words[offset:end:_WORDS].tolist() for offset in (_PARENT_TGID, _CHILD_PID, _CHILD_TGID)
        )
        what = self._words[_WHAT:end:_WORDS].tolist()
        if what.count(_FORK) == number and children == groups:  # processes only: the usual storm
            forks.parents.extend(parents)
            forks.children.extend(children)
            return
        for kind, parent, child, group in zip(what, parents, children, groups, strict=True):
            if kind != _FORK:
                continue
            if child == group:
                forks.parents.append(parent)
                forks.children.append(child)
            else:
                # Of a thread the kernel tells the parent of its process, which did nothing.
                forks.owners.append(group)

    def _dropped(self) -> int:
        """Events that the kernel could not queue, ever, modulo 2^32."""
        info = self._socket.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 64)
        return int(struct.unpack_from("I", info, 4 * _MEMINFO_DROPS)[0])
