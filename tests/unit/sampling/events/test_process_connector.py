"""The kernel reports every fork through pyroute2's socket and our own reads."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from nodeagent.sampling.events import process_connector
from nodeagent.sampling.events.process_connector import Connector, ConnectorError, open_connector

real = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the process connector requires CAP_NET_ADMIN")


@pytest.fixture
def listening() -> Iterator[Connector]:
    opened = open_connector()
    try:
        yield opened
    finally:
        opened.close()


def fork() -> int:
    """The PID of a process that has ended and was reaped."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def fork_many(count: int) -> tuple[int, list[int]]:
    """A process that has forked so often, and its children, which have ended. Forks of this process take longer."""
    code = (
        "import os, sys\nprint(os.getpid())\n"
        f"for _ in range({count}):\n  pid = os.fork()\n  if not pid: os._exit(0)\n"
        "  os.waitpid(pid, 0)\n  sys.stdout.write(f'{pid}\\n')"
    )
    parent, *children = map(int, python(code).split())
    return parent, children


def python(code: str, *before: str) -> str:
    done = subprocess.run([*before, sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    return done.stdout.strip()


@real
def test_a_fork_is_reported_with_its_parent_and_its_child(listening: Connector) -> None:
    child = fork()
    forks = listening.drain()
    assert (os.getpid(), child) in zip(forks.parents, forks.children, strict=True)
    assert forks.lost == 0


@real
def test_a_thread_is_no_process_and_belongs_to_its_process(listening: Connector) -> None:
    listening.drain()
    for _ in range(5):
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
    forks = listening.drain()
    assert forks.owners.count(os.getpid()) == 5
    assert os.getpid() not in forks.parents


@real
def test_only_forks_are_received(listening: Connector) -> None:
    listening.drain()
    before = listening.drain()
    assert before.lost == 0
    ours = 0
    subprocess.run(["/bin/true"], check=True)  # a fork, an exec, an exit
    with socket.socket(fileno=os.dup(listening.fileno())) as raw:
        while True:
            try:
                message = raw.recv(200, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            what = int.from_bytes(message[36:40], sys.byteorder)
            assert what == 1
            ours += int.from_bytes(message[56:60], sys.byteorder) == os.getpid()
    assert ours == 1


@real
def test_each_of_a_thousand_forks_is_reported(listening: Connector) -> None:
    listening.drain()
    forker, children = fork_many(1000)
    forks = listening.drain()
    of_it = [child for parent, child in zip(forks.parents, forks.children, strict=True) if parent == forker]
    assert (of_it, forks.lost) == (children, 0)


@real
def test_forks_that_do_not_fit_the_buffer_are_counted_and_later_ones_reported() -> None:
    small = open_connector(receive_buffer=16 << 10)
    try:
        small.drain()
        forker, _ = fork_many(500)
        forks = small.drain()
        assert 0 < forks.parents.count(forker) < 500
        # The sum includes every fork of this test, and those of other processes.
        assert len(forks.parents) + len(forks.owners) + forks.lost >= 500
        assert forks.lost > 300
        for _ in range(20):  # the forks of other processes may fill the small buffer
            child = fork()
            after = small.drain()
            if not after.lost:
                break
        assert child in after.children
        assert after.lost == 0
    finally:
        small.close()


@real
def test_nothing_of_the_library_stays_except_one_descriptor() -> None:
    open_connector().close()  # imports, which may open files
    descriptors, threads = os.listdir("/proc/self/fd"), threading.active_count()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    opened = open_connector()
    assert len(os.listdir("/proc/self/fd")) == len(descriptors) + 1
    assert threading.active_count() <= threads
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == handlers
    opened.close()
    assert os.listdir("/proc/self/fd") == descriptors


@real
@pytest.mark.parametrize(
    ("namespace", "remedy"),
    [(["--net"], "hostNetwork: true"), (["--pid", "--fork"], "hostPID: true"), (["--user"], "hostUsers: true")],
)
def test_in_a_namespace_of_its_own_the_error_has_the_remedy(namespace: list[str], remedy: str) -> None:
    message = python(
        "from nodeagent.sampling.events.process_connector import *\n"
        "try: open_connector()\n"
        "except ConnectorError as error: print(error)\n",
        "unshare",
        *namespace,
    )
    assert message.endswith(f"needs {remedy}")


@real
def test_a_kernel_without_a_reply_is_an_error_within_the_timeout() -> None:
    parts = process_connector.import_pyroute2()

    class Mute(parts.control):  # type: ignore[misc, name-defined]
        """A control message of a length that the kernel ignores."""

        def __setitem__(self, key: str, value: object) -> None:
            super().__setitem__(key, 3 if key == "len" else value)

    with pytest.raises(ConnectorError, match="no reply from the kernel"):
        open_connector(pyroute2=parts._replace(control=Mute))


# --- the import ------------------------------------------------------------------------------------------------------


def test_the_installed_version_is_imported_without_its_parent_package() -> None:
    python(
        "import sys\n"
        "from nodeagent.sampling.events import process_connector\n"
        "parts = process_connector.import_pyroute2()\n"
        "assert parts.light\n"
        "heavy = {'pyroute2', 'pyroute2.iproute', 'pyroute2.ndb', 'pyroute2.netlink.rtnl', 'sqlite3'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )


@real
def test_an_open_connector_imports_no_further_module() -> None:
    python(
        "import sys\n"
        "from nodeagent.sampling.events import process_connector\n"
        "process_connector.open_connector().close()\n"
        "assert 'pyroute2' not in sys.modules\n"
    )


def test_the_whole_package_can_still_be_imported_afterwards() -> None:
    python(
        "from nodeagent.sampling.events import process_connector\n"
        "parts = process_connector.import_pyroute2()\n"
        "import pyroute2\n"
        "assert pyroute2.IPRoute\n"
        "assert pyroute2.ProcEventSocket is parts.socket\n"
    )


@real
def test_a_release_that_cannot_be_imported_in_parts_is_imported_completely() -> None:
    # A finder that hides one submodule while the parent is a bare module, as if a release had moved it.
    python(
        "import sys\n"
        "from nodeagent.sampling.events import process_connector\n"
        "class Moved:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        parent = sys.modules.get('pyroute2')\n"
        "        if name == 'pyroute2.netlink.nlsocket' and not hasattr(parent, '__file__'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Moved())\n"
        "parts = process_connector.import_pyroute2()\n"
        "assert not parts.light\n"
        "process_connector.open_connector(pyroute2=parts).close()\n"
    )


def test_a_package_that_is_imported_already_is_used_completely() -> None:
    python(
        "import pyroute2\n"
        "from nodeagent.sampling.events import process_connector\n"
        "parts = process_connector.import_pyroute2()\n"
        "assert not parts.light\n"
        "assert parts.socket is pyroute2.ProcEventSocket\n"
    )
