"""The kubelet's thresholds are read again while the agent runs, and the API server is asked only where nothing else is
known."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.kube import kubelet_configz
from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.transport import Transport, connect
from nodeagent.loop.kubelet_watch import KubeletWatch
from nodeagent.model import MEMORY_SIGNALS, Signal
from nodeagent.sampling.hostfs.host import open_host
from tests.fake_kube import ApiServer
from tests.support.livenode import until
from tests.support.paths import RECORDINGS
from tests.support.trees import Node, write_node

CONFIG = "/var/lib/kubelet/config.yaml"
CONFIGZ = "/proxy/configz"
SOON_S = 0.02


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer() as server:
        recorded = json.loads((RECORDINGS / "kubelet-configz-200.json").read_text(encoding="utf-8"))
        server.kubelet_configuration = json.loads(recorded["response"]["body"])["kubeletconfig"] | {
            "evictionHard": {"memory.available": "333Mi"}
        }
        yield server


@pytest.fixture
def transport(api: ApiServer, tmp_path: Path) -> Transport:
    return connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node without a visible kubelet."""
    path = tmp_path / "node"
    path.mkdir()
    write_node(path, Node())
    return path


@pytest.fixture
def watch(root: Path, transport: Transport) -> Iterator[KubeletWatch]:
    """Not started."""
    made = KubeletWatch(
        open_host(str(root)), configz=lambda: kubelet_configz.fetch(transport, "lab-node"), every_s=SOON_S
    )
    yield made
    made.close()


def put(root: Path, memory: str) -> None:
    target = root / CONFIG.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    replacement = target.with_name("next")
    replacement.write_text(f"kind: KubeletConfiguration\nevictionHard: {{memory.available: {memory}}}\n")
    replacement.replace(target)


def start_kubelet(root: Path, *flags: str) -> None:
    files = {
        "sys/fs/cgroup/system.slice/kubelet.service/cgroup.procs": "77\n",
        "proc/77/cmdline": "\0".join(["/usr/bin/kubelet", f"--config={CONFIG}", *flags]) + "\0",
    }
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)


def start_k3s(root: Path) -> None:
    files = {
        "sys/fs/cgroup/system.slice/k3s.service/cgroup.procs": "78\n",
        "proc/78/cmdline": "/usr/local/bin/k3s server\0",
        "var/lib/rancher/k3s/agent/etc/kubelet.conf.d/00-k3s-defaults.conf": "evictionHard: {nodefs.available: 5%}\n",
    }
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)


def stop_kubelet(root: Path) -> None:
    (root / "sys/fs/cgroup/system.slice/kubelet.service/cgroup.procs").unlink()


def memory_of(watch: KubeletWatch) -> str:
    """The kubelet's hard memory threshold; empty if it is not known."""
    known = watch.latest.known or ()
    return next((each.value.text for each in known if each.signal is Signal.MEMORY), "")


def messages(watch: KubeletWatch) -> list[str]:
    return [note.message for note in watch.latest.notes]


def test_the_first_reading_is_made_at_once_and_without_the_api_server(root: Path, api: ApiServer) -> None:
    put(root, "500Mi")
    watch = KubeletWatch(open_host(str(root)), configz=pytest.fail)
    assert memory_of(watch) == "500Mi"
    assert api.requests == []


def test_a_file_that_changes_is_read_again(root: Path, watch: KubeletWatch, api: ApiServer) -> None:
    put(root, "500Mi")
    watch.start()
    until(lambda: memory_of(watch) == "500Mi", "the file that was written after the start")
    first = watch.latest
    put(root, "600Mi")
    until(lambda: memory_of(watch) == "600Mi", "the new file")
    assert first.known != watch.latest.known
    assert api.sent("GET", CONFIGZ) == [], "a readable file is enough"


def test_nothing_new_is_the_same_reading(root: Path, watch: KubeletWatch) -> None:
    put(root, "500Mi")
    watch.start()
    until(lambda: memory_of(watch) == "500Mi", "the file")
    first = watch.latest
    (root / "proc/loadavg").touch()
    put(root, "500Mi")
    watch.read_soon()
    until(lambda: watch.latest is first, "the same reading")


def test_known_thresholds_stay_while_nothing_can_be_read(root: Path, watch: KubeletWatch, api: ApiServer) -> None:
    api.forbid("get", "nodes/proxy")
    put(root, "500Mi")
    watch.start()
    until(lambda: memory_of(watch) == "500Mi", "the file")
    target = root / CONFIG.lstrip("/")
    target.write_text("a: [")
    until(lambda: messages(watch) != [], "the note")
    assert memory_of(watch) == "500Mi"
    assert messages(watch)[0].startswith("configuration no longer readable, its last known thresholds stay: ")
    put(root, "600Mi")
    until(lambda: memory_of(watch) == "600Mi", "the repaired file")
    assert messages(watch) == []


def test_the_api_server_is_asked_where_the_host_shows_no_kubelet(watch: KubeletWatch, api: ApiServer) -> None:
    watch.start()
    until(lambda: memory_of(watch) == "333Mi", "the kubelet's own answer")
    assert {each.signal for each in watch.latest.known or ()} == MEMORY_SIGNALS
    assert len(api.sent("GET", CONFIGZ)) == 1
    until(lambda: watch.latest is watch.latest, "further readings")
    watch.read_soon()
    until(lambda: len(api.sent("GET", CONFIGZ)) == 2, "the answer after a reload")


def test_a_refusal_is_one_note_and_is_not_repeated(watch: KubeletWatch, api: ApiServer) -> None:
    api.forbid("get", "nodes/proxy")
    watch.start()
    until(lambda: len(api.sent("GET", CONFIGZ)) == 1 and "nodes/proxy" in str(messages(watch)), "the refusal")
    (message,) = messages(watch)
    assert message.startswith(
        "configuration not known, defaults assumed: no process and no file of the kubelet is visible"
    )
    first = watch.latest
    assert first.known is None
    api.wait_for(lambda: False, timeout_s=10 * SOON_S)
    assert watch.latest is first
    assert len(api.sent("GET", CONFIGZ)) == 1


def test_a_server_that_does_not_answer_is_asked_again(watch: KubeletWatch, api: ApiServer) -> None:
    api.go_down()
    watch.start()
    until(lambda: "configz" in str(messages(watch)), "the failure")
    api.come_back()
    until(lambda: memory_of(watch) == "333Mi", "the answer")


def test_a_kubelet_that_restarts_keeps_the_thresholds_of_its_flags(root: Path, transport: Transport) -> None:
    put(root, "200Mi")
    start_kubelet(root, "--eviction-hard=memory.available<1Gi")
    watch = KubeletWatch(open_host(str(root)), configz=lambda: "", every_s=SOON_S)
    watch.start()
    try:
        assert memory_of(watch) == "1Gi"
        stop_kubelet(root)
        until(lambda: messages(watch) != [], "the note")
        assert memory_of(watch) == "1Gi", "the file alone is not what the kubelet uses"
        [message] = messages(watch)
        assert message.startswith("configuration no longer readable, its last known thresholds stay: ")
        assert "its flags may replace /var/lib/kubelet/config.yaml" in message
        start_kubelet(root, "--eviction-hard=memory.available<900Mi")
        until(lambda: memory_of(watch) == "900Mi", "the flags of the new process")
        assert messages(watch) == []
    finally:
        watch.close()


def test_an_answer_of_the_api_server_from_before_the_known_flags_does_not_replace_them(
    root: Path, watch: KubeletWatch, api: ApiServer
) -> None:
    watch.start()
    until(lambda: memory_of(watch) == "333Mi", "the kubelet's own answer")
    api.forbid("get", "nodes/proxy")
    put(root, "200Mi")
    start_kubelet(root, "--eviction-hard=memory.available<1Gi")
    until(lambda: memory_of(watch) == "1Gi", "the process")
    stop_kubelet(root)
    until(lambda: messages(watch) != [], "the note")
    assert memory_of(watch) == "1Gi"


def test_a_kubelet_whose_process_becomes_visible_replaces_the_answer_of_the_api_server(
    root: Path, watch: KubeletWatch, api: ApiServer
) -> None:
    watch.start()
    until(lambda: memory_of(watch) == "333Mi", "the kubelet's own answer")
    put(root, "600Mi")
    watch.read_soon()
    until(lambda: len(api.sent("GET", CONFIGZ)) == 2, "the answer after a reload")
    assert memory_of(watch) == "333Mi", "the kubelet's own answer contains its flags, the file does not"
    start_kubelet(root)
    until(lambda: memory_of(watch) == "600Mi", "the file")


def test_the_flags_of_k3s_are_those_of_its_annotation_as_soon_as_the_node_was_read(root: Path) -> None:
    start_k3s(root)
    arguments: list[tuple[str, ...]] = [()]
    watch = KubeletWatch(open_host(str(root)), configz=lambda: "", k3s_arguments=lambda: arguments[-1])
    assert watch.latest.known is None, "k3s hides its command line"
    watch.start()
    try:
        arguments.append(("server", "--kubelet-arg", "eviction-hard=memory.available<1Gi"))
        watch.follow_k3s()
        until(lambda: memory_of(watch) == "1Gi", "the annotation, without waiting for the next reading")
        (root / "sys/fs/cgroup/system.slice/k3s.service/cgroup.procs").unlink()
        watch.read_soon()
        until(lambda: messages(watch) != [], "the restart of k3s")
        assert memory_of(watch) == "1Gi"
    finally:
        watch.close()


def test_the_kubelet_of_k3s_is_asked_where_its_node_has_no_annotation(root: Path, watch: KubeletWatch) -> None:
    start_k3s(root)
    watch.start()
    until(lambda: memory_of(watch) == "333Mi", "the kubelet's own answer")
