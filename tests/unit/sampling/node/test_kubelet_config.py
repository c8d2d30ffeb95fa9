"""The kubelet's configuration is found on the host, or its absence is reported."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from nodeagent.commands import check
from nodeagent.config import amount, quantity, resolve
from nodeagent.model import Signal
from nodeagent.report import sections, text
from nodeagent.report.json_document import to_json
from nodeagent.sampling.hostfs.host import Host, open_host
from nodeagent.sampling.node import kubelet_config, other_oom_handlers
from nodeagent.sampling.node.kubelet_config import KubeletReader
from tests.fake_kube import ApiServer
from tests.support import config_files, schemas
from tests.support.paths import DATA, RECORDINGS
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
    assert kubelet_config.read_thresholds(open_host(write_node(tmp_path, Node(kubepods=False)))) == (None, ())


def test_a_kubelet_that_shows_nothing_but_the_cgroup_of_its_pods_is_not_known(tmp_path: Path) -> None:
    reading = kubelet_config.read_thresholds(open_host(write_node(tmp_path, Node())))
    assert reading.known is None
    assert [note.message for note in reading.notes] == [
        "configuration not known, defaults assumed: no process and no file of the kubelet is visible"
    ]


def test_the_usual_file_is_found_and_gives_the_effective_thresholds(tmp_path: Path) -> None:
    write_node(tmp_path, Node())
    put(tmp_path, "/var/lib/kubelet/config.yaml", STRICT)
    view, notes = kubelet_config.read_thresholds(open_host(str(tmp_path)))
    assert view is not None
    assert view.path == "/var/lib/kubelet/config.yaml, flags not visible"
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


def test_a_relative_path_is_below_the_working_directory_of_the_kubelet(tmp_path: Path) -> None:
    write_node(tmp_path, Node())
    running_kubelet(tmp_path, "--config=kubelet.yaml", "--config-dir=./kubelet.d")
    reading = kubelet_config.read_thresholds(open_host(str(tmp_path)))
    assert reading.known is None, "its file is not read, so the defaults are no fact"
    assert "give it an absolute path" in reading.notes[0].message
    put(tmp_path, "/opt/kubelet.yaml", STRICT)
    put(tmp_path, "/opt/kubelet.d/10.conf", "evictionHard: {memory.available: 600Mi}\n")
    (tmp_path / "proc/77/cwd").symlink_to(tmp_path / "opt")
    reading = kubelet_config.read_thresholds(open_host(str(tmp_path)))
    assert {str(each.signal): each.value.text for each in reading.known or ()} == {
        "memory.available": "600Mi",
        "allocatableMemory.available": "600Mi",
        "pid.available": "1%",
    }


def test_a_configuration_that_cannot_be_read_is_a_note(tmp_path: Path) -> None:
    write_node(tmp_path, Node())
    running_kubelet(tmp_path, "--config=/gone.yaml")
    view, (note,) = kubelet_config.read_thresholds(open_host(str(tmp_path)))
    assert view is not None
    assert "/gone.yaml" in view.unread
    assert note.message.startswith("configuration not known, defaults assumed: ")
    assert "/gone.yaml" in note.message
    put(tmp_path, "/gone.yaml", "evictionHard: {memory.available: many}\n")
    _, (note,) = kubelet_config.read_thresholds(open_host(str(tmp_path)))
    assert "many" in note.message


def json_report(root: Path, body: str, *, kubeconfig: Path | None = None) -> dict[str, Any]:
    """The report about this host with this configuration."""
    config = root / "nodeagent.yaml"
    config.write_text(config_files.file(body))
    options = check.options_from(host_root=str(root), config_file=str(config))
    if kubeconfig is not None:
        options = check.options_from(
            host_root=str(root), config_file=str(config), kubeconfig=str(kubeconfig), node_name="lab-node", api="always"
        )
    checker = check.NodeChecker(options)
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
    assert ["configuration not known, defaults assumed" in note.message for note in notes] == [True]
    (note,) = other_oom_handlers.find_handlers(host, kubelet=view.thresholds, kubelet_unread=view.unread)
    assert note.message.startswith("kubelet eviction not known, defaults assumed (")
    assert view.unread in note.message
    assert "is on" not in note.message
    checker = check.NodeChecker(check.options_from(host_root=str(tmp_path)))
    try:
        report = checker.make_report()
    finally:
        checker.close()
    document = to_json(report)
    assert (document["kubelet"]["assumed"], document["kubelet"]["reason"]) == (True, view.unread)
    assert list(schemas.strict().iter_errors(document)) == []
    assert "not known, defaults assumed)" in text.render(sections.sections(report))


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


def test_a_directory_of_drop_ins_that_cannot_be_read_makes_the_thresholds_unknown(tmp_path: Path) -> None:
    write_node(tmp_path, Node())
    put(tmp_path, "/etc/k.yaml", STRICT)
    running_kubelet(tmp_path, "--config=/etc/k.yaml", "--config-dir=/etc/k.conf.d")
    reading = kubelet_config.read_thresholds(open_host(str(tmp_path)))
    assert reading.known is None
    assert "/etc/k.conf.d" in reading.notes[0].message


# --- the kubelets of distributions ------------------------------------------------------------------------------------

DISTRIBUTIONS = sorted((DATA / "kubelet").glob("*.yaml"))
IDS = [path.stem for path in DISTRIBUTIONS]


class Distribution(NamedTuple):
    """One file of tests/data/kubelet."""

    source: str
    cgroup: str
    memory: str
    arguments: list[str]
    files: dict[str, str]
    kubelet: dict[str, str]
    ours: dict[str, str]
    node_args: Sequence[str] = ()
    """The annotation that k3s writes to its Node."""
    others: Sequence[list[str]] = ()
    """Further processes in the cgroup, before the kubelet."""
    shortened_grace: Mapping[str, float] = {}
    """Signals on which the kubelet's soft grace period is shorter than our built-in one, and what ours is then."""


def distribution(path: Path) -> Distribution:
    return Distribution(**yaml.safe_load(path.read_text(encoding="utf-8")))


def write_distribution(root: Path, each: Distribution) -> Host:
    """A node of this distribution and size."""
    write_node(root, Node(memory_total=quantity.parse_quantity(each.memory)))
    (root / "var/lib/rancher/k3s/agent/etc").mkdir(parents=True, exist_ok=True)
    lines = [*each.others, each.arguments]
    put(root, f"/sys/fs/cgroup/{each.cgroup}/cgroup.procs", "".join(f"{100 + n}\n" for n in range(len(lines))))
    for number, words in enumerate(lines):
        put(root, f"/proc/{100 + number}/cmdline", "\0".join(words) + "\0")
    for path, content in each.files.items():
        put(root, path, content)
    return open_host(str(root))


@pytest.mark.parametrize("path", DISTRIBUTIONS, ids=IDS)
def test_the_thresholds_of_each_distributions_kubelet_are_read(path: Path, tmp_path: Path) -> None:
    expected = distribution(path)
    reading = kubelet_config.read_thresholds(write_distribution(tmp_path, expected), expected.node_args)
    assert reading.notes == ()
    assert reading.known is not None
    found = {
        f"{each.signal}{'' if each.hard else ' soft'}": each.value.text
        for each in reading.known
        if each.signal is not Signal.ALLOCATABLE_MEMORY
    }
    assert found == expected.kubelet


@pytest.mark.parametrize("path", DISTRIBUTIONS, ids=IDS)
def test_our_thresholds_are_above_those_of_each_distributions_kubelet(path: Path, tmp_path: Path) -> None:
    expected = distribution(path)
    write_distribution(tmp_path, expected)
    if expected.node_args:
        with ApiServer() as api:
            api.patch_node({"metadata": {"annotations": {"k3s.io/node-args": json.dumps(expected.node_args)}}})
            document = json_report(tmp_path, "", kubeconfig=api.kubeconfig(tmp_path / "kubeconfig"))
            assert api.sent("GET", "/proxy/configz") == []
    else:
        document = json_report(tmp_path, "")
    (memory,) = [each for each in document["signals"] if each["name"] == "memory.available"]
    capacity = memory["capacity"]
    for threshold in memory["thresholds"]:
        level = expected.ours[threshold["tier"]]
        assert threshold["value"] == resolve.resolve_amount(amount.parse_amount(level), capacity=capacity), threshold
    assert {each["verdict"] for each in document["kubelet"]["thresholds"]} == {"ours first"}
    shortened = {
        signal["name"]: threshold["gracePeriodSeconds"]
        for signal in document["signals"]
        for threshold in signal["thresholds"]
        if threshold["configuredGracePeriodSeconds"] is not None
    }
    assert {name: grace for name, grace in shortened.items() if "containerfs" not in name} == expected.shortened_grace


K3S_BEFORE_DROP_INS = DATA / "kubelet" / "k3s-1.31.yaml"


def test_k3s_without_its_directory_is_not_known(tmp_path: Path) -> None:
    """As in a pod that mounts only /proc and the cgroups: a drop-in may set anything."""
    expected = distribution(K3S_BEFORE_DROP_INS)
    host = write_distribution(tmp_path, expected)
    assert kubelet_config.read_thresholds(host, expected.node_args).known is not None
    (tmp_path / "var/lib/rancher/k3s/agent/etc").rmdir()
    reading = kubelet_config.read_thresholds(host, expected.node_args)
    assert reading.known is None
    assert "/var/lib/rancher/k3s/agent/etc: not visible" in reading.notes[0].message


@pytest.mark.parametrize("name", ["k3s-1.31", "k3s-1.32"])
def test_k3s_hides_its_command_line_so_that_without_its_annotation_its_flags_are_not_known(
    name: str, tmp_path: Path
) -> None:
    """With INSTALL_K3S_EXEC its arguments are in the systemd unit alone."""
    host = write_distribution(tmp_path, distribution(DATA / "kubelet" / f"{name}.yaml"))
    put(tmp_path, "/etc/rancher/k3s/config.yaml", "kubelet-arg: [eviction-hard=memory.available<2Gi]\n")
    reading = kubelet_config.read_thresholds(host)
    assert reading.known is None
    assert "k3s hides its command line" in reading.notes[0].message
    flags = ("server", "--kubelet-arg", "eviction-hard=memory.available<1Gi")
    known = kubelet_config.read_thresholds(host, flags).known
    assert {str(each.signal): each.value.text for each in known or ()} == {
        "memory.available": "1Gi",
        "allocatableMemory.available": "1Gi",
    }


def test_a_kubeconfig_where_openshift_has_its_settings_is_no_configuration_of_the_kubelet(tmp_path: Path) -> None:
    write_node(tmp_path, Node())
    put(tmp_path, "/etc/kubernetes/kubelet.conf", "apiVersion: v1\nclusters: []\nkind: Config\n")
    assert kubelet_config.read_thresholds(open_host(str(tmp_path))).known is None


def test_a_reading_is_the_same_object_until_a_source_changes(tmp_path: Path) -> None:
    host = write_distribution(tmp_path, distribution(DATA / "kubelet" / "kubeadm-drop-ins.yaml"))
    reader = KubeletReader(host)
    first = reader.read()
    assert reader.read() is first
    put(tmp_path, "/etc/kubernetes/kubelet.conf.d/25-memory.conf", "evictionHard: {memory.available: 600Mi}\n")
    second = reader.read()
    assert second is not first
    assert second.known is not None
    assert {each.value.text for each in second.known if each.signal is Signal.MEMORY} == {"600Mi"}


def test_the_recorded_answer_of_a_kubelets_configz_gives_its_thresholds() -> None:
    body = json.loads((RECORDINGS / "kubelet-configz-200.json").read_text(encoding="utf-8"))["response"]["body"]
    reading = kubelet_config.from_configz(body)
    assert reading.known is not None
    assert reading.notes == ()
    assert reading.kubelet is not None
    assert reading.kubelet.path == "configz, from the API server"
