"""The kubelet's configuration is found on the host, or its absence is reported."""

from pathlib import Path
from typing import Any

import pytest

from nodeagent.commands import check
from nodeagent.model import Signal
from nodeagent.report import sections, text
from nodeagent.report.json_document import to_json
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.node import kubelet_config, other_oom_handlers
from tests.support import config_files, schemas
from tests.support.trees import Node, write_node

STRICT = 'kind: KubeletConfiguration\nevictionHard: {memory.available: "500Mi", pid.available: "1%"}\n'


def put(root: Path, path: str, text: str) -> None:
    target = root / path.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def running_kubelet(root: Path, *arguments: str) -> None:
    put(root, "/sys/fs/cgroup/system.slice/kubelet.service/cgroup.procs", "77\n")
    put(root, "/proc/77/cmdline", "\0".join(["/usr/bin/kubelet", *arguments]) + "\0")


def test_a_host_without_a_kubelet_has_none_and_no_note(tmp_path: Path) -> None:
    assert kubelet_config.read_thresholds(open_host(write_node(tmp_path, Node()))) == (None, ())


def test_the_usual_file_is_found_and_gives_the_effective_thresholds(tmp_path: Path) -> None:
    write_node(tmp_path, Node())
    put(tmp_path, "/var/lib/kubelet/config.yaml", STRICT)
    view, notes = kubelet_config.read_thresholds(open_host(str(tmp_path)))
    assert view is not None
    assert view.path == "/var/lib/kubelet/config.yaml"
    # The file's map replaces the kubelet's defaults, and hard memory applies to allocatable memory too.
    assert {each.signal for each in view.thresholds} == {Signal.MEMORY, Signal.ALLOCATABLE_MEMORY, Signal.PID}
    assert notes == ()


def test_the_command_line_names_another_file_and_its_flags_win(tmp_path: Path) -> None:
    write_node(tmp_path, Node())
    put(tmp_path, "/var/lib/kubelet/config.yaml", "evictionHard: {}\n")
    put(tmp_path, "/opt/kubelet.yaml", STRICT)
    running_kubelet(tmp_path, "--config=/opt/kubelet.yaml", "--eviction-hard", "memory.available<250Mi")
    view, _ = kubelet_config.read_thresholds(open_host(str(tmp_path)))
    assert view is not None
    assert view.path == "/opt/kubelet.yaml"
    assert {each.value.text for each in view.thresholds} == {"250Mi"}


def test_a_configuration_that_cannot_be_read_is_a_note(tmp_path: Path) -> None:
    write_node(tmp_path, Node())
    running_kubelet(tmp_path, "--config=/gone.yaml")
    view, (note,) = kubelet_config.read_thresholds(open_host(str(tmp_path)))
    assert view is not None
    assert "/gone.yaml" in view.unread
    assert note.message.startswith("configuration unknown, defaults assumed: ")
    assert "/gone.yaml" in note.message
    put(tmp_path, "/gone.yaml", "evictionHard: {memory.available: many}\n")
    _, (note,) = kubelet_config.read_thresholds(open_host(str(tmp_path)))
    assert "many" in note.message


def json_report(root: Path, body: str) -> dict[str, Any]:
    """The report about this host with this configuration."""
    config = root / "nodeagent.yaml"
    config.write_text(config_files.file(body))
    checker = check.NodeChecker(check.options_from(host_root=str(root), config_file=str(config)))
    try:
        return to_json(checker.make_report())
    finally:
        checker.close()


def verdicts_of(document: dict[str, Any]) -> dict[str, str]:
    return {each["signal"]: each["verdict"] for each in document["kubelet"]["thresholds"]}


def test_the_report_keeps_our_thresholds_above_the_kubelets(tmp_path: Path) -> None:
    write_node(tmp_path, Node())
    put(tmp_path, "/var/lib/kubelet/config.yaml", STRICT)
    document = json_report(tmp_path, "")
    assert set(verdicts_of(document).values()) == {"ours first"}
    assert not [note for note in document["notes"] if note["subject"] == "kubelet"]
    (memory,) = [each for each in document["signals"] if each["name"] == "memory.available"]
    values = {each["tier"]: each["value"] for each in memory["thresholds"]}
    assert values == {"hard": 750 * 2**20, "soft": 1000 * 2**20}


def test_the_report_warns_if_the_kubelet_would_act_first(tmp_path: Path) -> None:
    write_node(tmp_path, Node())
    put(tmp_path, "/var/lib/kubelet/config.yaml", STRICT)
    document = json_report(tmp_path, "aboveKubelet: false")
    assert verdicts_of(document) == {
        "memory.available": "kubelet first",
        "allocatableMemory.available": "kubelet first",
        "pid.available": "ours first",
    }
    warnings = [note["message"] for note in document["notes"] if note["subject"] == "kubelet"]
    assert len(warnings) == 2
    assert all(message.startswith("the kubelet would act first: the kubelet evicts at ") for message in warnings)


@pytest.mark.parametrize("content", [None, "", "  \n", "a: [", "just text", "- a list"])
def test_an_unreadable_configuration_is_assumed_and_never_a_fact(tmp_path: Path, content: str | None) -> None:
    write_node(tmp_path, Node())
    running_kubelet(tmp_path, "--config=/etc/k.yaml")
    if content is not None:
        put(tmp_path, "/etc/k.yaml", content)
    host = open_host(str(tmp_path))
    view, notes = kubelet_config.read_thresholds(host)
    assert view is not None
    assert "/etc/k.yaml" in view.unread
    assert ["configuration unknown, defaults assumed" in note.message for note in notes] == [True]
    (note,) = other_oom_handlers.find_handlers(host, kubelet=view.thresholds, kubelet_unread=view.unread)
    assert note.message.startswith(f"kubelet eviction unknown ({view.unread}): defaults assumed (")
    assert "is on" not in note.message
    checker = check.NodeChecker(check.options_from(host_root=str(tmp_path)))
    try:
        report = checker.make_report()
    finally:
        checker.close()
    document = to_json(report)
    assert (document["kubelet"]["assumed"], document["kubelet"]["reason"]) == (True, view.unread)
    assert list(schemas.strict().iter_errors(document)) == []
    assert "unknown, defaults assumed)" in text.render(sections.sections(report))


def test_a_usual_file_that_cannot_be_read_is_unknown_too(tmp_path: Path) -> None:
    """The process is invisible: the agent has a PID namespace of its own."""
    write_node(tmp_path, Node())
    put(tmp_path, "/var/lib/kubelet/config.yaml", "")
    view, _ = kubelet_config.read_thresholds(open_host(str(tmp_path)))
    assert view is not None
    assert view.unread


def test_eviction_flags_are_known_whatever_the_file_contains(tmp_path: Path) -> None:
    write_node(tmp_path, Node())
    running_kubelet(tmp_path, "--eviction-hard=memory.available<250Mi")
    view, notes = kubelet_config.read_thresholds(open_host(str(tmp_path)))
    assert view is not None
    assert (view.unread, notes) == ("", ())
    running_kubelet(tmp_path, "--config=/gone.yaml", "--eviction-hard=memory.available<250Mi")
    view, (note,) = kubelet_config.read_thresholds(open_host(str(tmp_path)))
    assert view is not None
    assert {each.value.text for each in view.thresholds} == {"250Mi"}
    assert "/gone.yaml" in note.message
    assert view.unread == "", "its flags are a fact"


def test_drop_ins_that_are_not_read_are_reported(tmp_path: Path) -> None:
    write_node(tmp_path, Node())
    put(tmp_path, "/etc/k.yaml", STRICT)
    running_kubelet(tmp_path, "--config=/etc/k.yaml", "--config-dir=/etc/k.conf.d")
    _, (note,) = kubelet_config.read_thresholds(open_host(str(tmp_path)))
    assert "--config-dir /etc/k.conf.d" in note.message
