"""The kernel tells every fork, through pyroute2's socket and our own reading of it."""

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

real = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the process connector wants CAP_NET_ADMIN")


@pytest.fixture
def listening() -> Iterator[Connector]:
    opened = open_connector()
    try:
        yield opened
    finally:
        opened.close()


def fork() -> int:
    """A process that ends at once, already reaped."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def python(code: str, *before: str) -> str:
    done = subprocess.run([*before, sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    return done.stdout.strip()


@real
def test_a_fork_is_told_with_its_parent_and_its_child(listening: Connector) -> None:
    child = fork()
    forks = listening.drain()
    assert (os.getpid(), child) in zip(forks.parents, forks.children, strict=True)
    assert forks.lost == 0


@real
def test_a_thread_is_no_process_and_belongs_to_the_one_that_made_it(listening: Connector) -> None:
    listening.drain()
    for _ in range(5):
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
    forks = listening.drain()
    assert forks.owners.count(os.getpid()) == 5
    assert os.getpid() not in forks.parents


@real
def test_only_forks_reach_us(listening: Connector) -> None:
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
def test_a_thousand_forks_are_told_one_by_one(listening: Connector) -> None:
    listening.drain()
    children = [fork() for _ in range(1000)]
    forks = listening.drain()
    mine = [child for parent, child in zip(forks.parents, forks.children, strict=True) if parent == os.getpid()]
    assert (mine, forks.lost) == (children, 0)


@real
def test_forks_that_do_not_fit_the_buffer_are_counted_and_the_next_ones_told() -> None:
    small = open_connector(receive_buffer=16 << 10)
    try:
        small.drain()
        for _ in range(500):
            fork()
        forks = small.drain()
        assert 0 < forks.parents.count(os.getpid()) < 500
        told = len(forks.parents) + len(forks.owners) + forks.lost
        # Others on this machine fork, too; a fork of ours is never missing from the sum.
        assert told >= 500
        assert forks.lost > 300
        for _ in range(20):  # the buffer is small for all that others on this machine fork
            child = fork()
            after = small.drain()
            if not after.lost:
                break
        assert child in after.children
        assert after.lost == 0
    finally:
        small.close()


@real
def test_nothing_of_the_library_stays_but_one_descriptor() -> None:
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
    ("namespace", "mend"),
    [(["--net"], "hostNetwork: true"), (["--pid", "--fork"], "hostPID: true"), (["--user"], "hostUsers: true")],
)
def test_in_a_namespace_of_its_own_it_is_refused_with_what_would_help(namespace: list[str], mend: str) -> None:
    said = python(
        "from nodeagent.sampling.events.process_connector import *\n"
        "try: open_connector()\n"
        "except ConnectorError as error: print(error)\n",
        "unshare",
        *namespace,
    )
    assert said.endswith(f"needs {mend}")


@real
def test_a_kernel_that_stays_silent_is_not_waited_for() -> None:
    parts = process_connector.load()

    class Mute(parts.control):  # type: ignore[misc, name-defined]
        """A control message whose length the kernel does not know, which it passes over without a word."""

        def __setitem__(self, key: str, value: object) -> None:
            super().__setitem__(key, 3 if key == "len" else value)

    with pytest.raises(ConnectorError, match="does not answer"):
        open_connector(official=parts._replace(control=Mute))


# --- the import ------------------------------------------------------------------------------------------------------


def test_the_installed_version_loads_without_its_parent_package() -> None:
    python(
        "import sys\n"
        "from nodeagent.sampling.events import process_connector\n"
        "parts = process_connector.load()\n"
        "assert parts.light\n"
        "heavy = {'pyroute2', 'pyroute2.iproute', 'pyroute2.ndb', 'pyroute2.netlink.rtnl', 'sqlite3'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )


@real
def test_listening_imports_no_more_of_it() -> None:
    python(
        "import sys\n"
        "from nodeagent.sampling.events import process_connector\n"
        "process_connector.open_connector().close()\n"
        "assert 'pyroute2' not in sys.modules\n"
    )


def test_the_whole_package_can_still_be_imported_afterwards() -> None:
    python(
        "from nodeagent.sampling.events import process_connector\n"
        "parts = process_connector.load()\n"
        "import pyroute2\n"
        "assert pyroute2.IPRoute\n"
        "assert pyroute2.ProcEventSocket is parts.socket\n"
    )


@real
def test_a_release_that_does_not_load_in_parts_is_imported_whole() -> None:
    # A finder that hides one submodule as long as the parent is a bare module: as if a release had moved it.
    python(
        "import sys\n"
        "from nodeagent.sampling.events import process_connector\n"
        "class Moved:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        parent = sys.modules.get('pyroute2')\n"
        "        if name == 'pyroute2.netlink.nlsocket' and not hasattr(parent, '__file__'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Moved())\n"
        "parts = process_connector.load()\n"
        "assert not parts.light\n"
        "process_connector.open_connector(official=parts).close()\n"
    )


def test_the_package_is_taken_whole_when_someone_has_it_already() -> None:
    python(
        "import pyroute2\n"
        "from nodeagent.sampling.events import process_connector\n"
        "parts = process_connector.load()\n"
        "assert not parts.light\n"
        "assert parts.socket is pyroute2.ProcEventSocket\n"
    )
