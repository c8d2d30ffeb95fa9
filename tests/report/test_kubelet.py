from pathlib import Path

from nodeagent.model import Signal
from nodeagent.report import check
from nodeagent.report.document import node_report
from nodeagent.report.kubelet import find
from nodeagent.sampling.host import open_host
from tests.trees import Node, write_node

STRICT = 'kind: KubeletConfiguration\nevictionHard: {memory.available: "500Mi", pid.available: "1%"}\n'


def put(root: Path, path: str, text: str) -> None:
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def running_kubelet(root: Path, *arguments: str) -> None:
    put(root, "/sys/fs/cgroup/system.slice/kubelet.service/cgroup.procs", "77\n")
    put(root, "/proc/77/cmdline", "\0".join(["/usr/bin/kubelet", *arguments]) + "\0")


def test_a_host_without_a_kubelet_has_none_and_no_note(tmp_path: Path) -> None:
    assert find(open_host(write_node(tmp_path, Node()))) == (None, ())


def test_the_usual_file_is_found_and_gives_the_effective_thresholds(tmp_path: Path) -> None:
    write_node(tmp_path, Node())
    put(tmp_path, "/var/lib/kubelet/config.yaml", STRICT)
    view, notes = find(open_host(str(tmp_path)))
    assert view is not None
    assert view.path == "/var/lib/kubelet/config.yaml"
    # The file's map replaces the kubelet's defaults, and hard memory guards allocatable memory as well.
    assert {each.signal for each in view.thresholds} == {Signal.MEMORY, Signal.ALLOCATABLE_MEMORY, Signal.PID}
    assert notes == ()


def test_the_command_line_names_another_file_and_its_flags_win(tmp_path: Path) -> None:
    write_node(tmp_path, Node())
    put(tmp_path, "/var/lib/kubelet/config.yaml", "evictionHard: {}\n")
    put(tmp_path, "/opt/kubelet.yaml", STRICT)
    running_kubelet(tmp_path, "--config=/opt/kubelet.yaml", "--eviction-hard", "memory.available<250Mi")
    view, _ = find(open_host(str(tmp_path)))
    assert view is not None
    assert view.path == "/opt/kubelet.yaml"
    assert {each.value.text for each in view.thresholds} == {"250Mi"}


def test_a_configuration_that_cannot_be_read_is_a_note(tmp_path: Path) -> None:
    write_node(tmp_path, Node())
    running_kubelet(tmp_path, "--config=/gone.yaml")
    view, (note,) = find(open_host(str(tmp_path)))
    assert view is not None
    assert "/gone.yaml" in note.message
    put(tmp_path, "/gone.yaml", "evictionHard: {memory.available: many}\n")
    _, (note,) = find(open_host(str(tmp_path)))
    assert "many" in note.message


def test_the_report_warns_where_the_kubelet_would_act_first(tmp_path: Path) -> None:
    write_node(tmp_path, Node())
    put(tmp_path, "/var/lib/kubelet/config.yaml", STRICT)
    observer = check.Observer(check.wish(host_root=str(tmp_path)))
    try:
        document = node_report(observer.look())
    finally:
        observer.close()
    verdicts = {each["signal"]: each["verdict"] for each in document["kubelet"]["thresholds"]}
    assert verdicts == {
        "memory.available": "kubelet first",
        "allocatableMemory.available": "kubelet first",
        "pid.available": "ours first",
    }
    warned = [note["message"] for note in document["notes"] if note["subject"] == "kubelet"]
    assert len(warned) == 2
    assert all(message.startswith("it would act first: the kubelet evicts at ") for message in warned)
