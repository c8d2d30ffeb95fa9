"""The kubectl plugin: it finds the agent's pod of a node, runs a command in it, and brings a snapshot home whole."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from nodeagent import __version__
from tests.support import manifests
from tests.support.kubectl import COMPLETION, END_OF_ZIP, PLUGIN, FakeKubectl, Ran
from tests.support.paths import REPOSITORY

MANIFEST = REPOSITORY / "kubectl-plugin" / "nodeagent.yaml"
SNAPSHOT = b"samples and decisions" + END_OF_ZIP


@pytest.fixture
def kubectl(tmp_path: Path) -> FakeKubectl:
    (tmp_path / "bin").mkdir()
    (tmp_path / "work").mkdir()
    return FakeKubectl(tmp_path / "bin")


@pytest.fixture
def work(tmp_path: Path) -> Path:
    return tmp_path / "work"


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- the command in the pod ------------------------------------------------------------------------------------------


def test_check_runs_in_the_agents_pod_with_the_host_and_its_configuration(kubectl: FakeKubectl, work: Path) -> None:
    kubectl.answers(b"a report\n")
    assert kubectl.run("check node-1 -o json --signal pid.available", directory=work) == Ran(0, b"a report\n", "")
    assert kubectl.calls[-1] == [
        *("exec", "--namespace", "nodeagent", "--container", "nodeagent", "nodeagent-abcde", "--", "nodeagent"),
        *("check", "--host-root", "/host", "--config", "/etc/nodeagent/config.yaml"),
        *("-o", "json", "--signal", "pid.available"),
    ]


def test_explain_keeps_its_own_options(kubectl: FakeKubectl, work: Path) -> None:
    kubectl.run("explain node/node-1 last -n 5", directory=work)
    assert kubectl.in_pod == ["nodeagent", "explain", "--config", "/etc/nodeagent/config.yaml", "last", "-n", "5"]


@pytest.mark.parametrize("code", [0, 1, 2, 3, 130])
def test_the_exit_code_is_that_of_the_command(kubectl: FakeKubectl, work: Path, code: int) -> None:
    kubectl.answers(b"", code=code)
    assert kubectl.run("check node-1", directory=work).code == code


def test_options_of_kubectl_reach_every_call_as_they_were_written(kubectl: FakeKubectl, work: Path) -> None:
    line = """--context "it's a 'lab'" --kubeconfig 'my file' check node-1 --user=me --as me@example.com"""
    assert kubectl.run(line, directory=work).code == 0
    options = ["--context=it's a 'lab'", "--kubeconfig=my file", "--user=me", "--as=me@example.com"]
    assert [call[:4] for call in kubectl.calls] == [options, options]


def test_a_word_is_never_run_as_a_command_of_the_shell(kubectl: FakeKubectl, work: Path) -> None:
    kubectl.run("""--context '$(touch pwned)' check node-1 '`touch pwned`' '; touch pwned' --user='x";touch pwned'""",
                directory=work)  # fmt: skip
    assert files(work) == []
    assert kubectl.in_pod[-2:] == ["`touch pwned`", "; touch pwned"]


@pytest.mark.parametrize(
    "line", ["-n tools check node-1", "check node-1 --namespace=tools", "--namespace tools check node-1"]
)
def test_the_agent_may_live_in_another_namespace(kubectl: FakeKubectl, work: Path, line: str) -> None:
    kubectl.has_pods(("agent-1", "Running", "True", "", "node-1"), namespace="tools")
    assert kubectl.run(line, directory=work).code == 0
    assert kubectl.calls[-1][:3] == ["exec", "--namespace", "tools"]


def test_a_kubeconfig_after_the_node_is_one_in_the_pod(kubectl: FakeKubectl, work: Path) -> None:
    kubectl.run("check node-1 --kubeconfig /etc/kubeconfig", directory=work)
    assert kubectl.in_pod[-2:] == ["--kubeconfig", "/etc/kubeconfig"]


# --- the pod ---------------------------------------------------------------------------------------------------------


def test_a_pod_that_is_being_replaced_is_not_used(kubectl: FakeKubectl, work: Path) -> None:
    kubectl.has_pods(
        ("old", "Running", "True", "2026-11-24T19:00:00Z", "node-1"),
        ("failed", "Failed", "False", "", "node-1"),
        ("new", "Running", "True", "", "node-1"),
        ("elsewhere", "Running", "True", "", "node-2"),
    )
    assert kubectl.run("check node-1", directory=work).code == 0
    assert "new" in kubectl.calls[-1]


def test_a_node_without_an_agent_is_an_error(kubectl: FakeKubectl, work: Path) -> None:
    kubectl.has_pods()
    ran = kubectl.run("check node-1", directory=work)
    assert (ran.code, ran.out) == (3, b"")
    assert ran.error == (
        "kubectl nodeagent: no agent on node node-1: namespace nodeagent has no running pod there with the label"
        " app.kubernetes.io/name=nodeagent\n"
    )


def test_a_node_that_does_not_exist_is_named_by_kubectl(kubectl: FakeKubectl, work: Path) -> None:
    ran = kubectl.run("check node-7", directory=work)
    assert ran.code == 3
    assert ran.error == (
        'Error from server (NotFound): nodes "node-7" not found\nkubectl nodeagent: no agent on node node-7\n'
    )


def test_several_agents_on_one_node_are_an_error(kubectl: FakeKubectl, work: Path) -> None:
    kubectl.has_pods(("one", "Running", "True", "", "node-1"), ("two", "Running", "True", "", "node-1"))
    ran = kubectl.run("check node-1", directory=work)
    assert (ran.code, ran.error) == (
        3, "kubectl nodeagent: several agents on node node-1: one, two; delete all but one\n"
    )  # fmt: skip


def test_an_agent_that_does_not_run_yet_is_an_error(kubectl: FakeKubectl, work: Path) -> None:
    kubectl.has_pods(("one", "Pending", "", "", "node-1"))
    ran = kubectl.run("check node-1", directory=work)
    assert (ran.code, ran.error) == (
        3,
        "kubectl nodeagent: the agent on node node-1 does not run: pod one is Pending\n",
    )


def test_an_agent_that_is_not_ready_is_used_with_a_warning(kubectl: FakeKubectl, work: Path) -> None:
    """It is not ready while the API server is away, which is when one looks."""
    kubectl.has_pods(("one", "Running", "False", "", "node-1"))
    kubectl.answers(b"a report\n")
    assert kubectl.run("check node-1", directory=work) == Ran(
        0, b"a report\n", "kubectl nodeagent: pod one is not ready; trying anyway\n"
    )


def test_missing_rights_are_named_by_kubectl(kubectl: FakeKubectl, work: Path) -> None:
    ran = kubectl.run("-n forbidden check node-1", directory=work)
    assert ran.code == 3
    assert "Error from server (Forbidden): pods is forbidden" in ran.error
    assert ran.error.endswith("kubectl nodeagent: the pods in namespace forbidden could not be listed\n")


def test_an_unknown_context_is_named_by_kubectl(kubectl: FakeKubectl, work: Path) -> None:
    ran = kubectl.run("check node-1 --context unknown", directory=work)
    assert ran.code == 3
    assert ran.error.startswith('error: context "unknown" does not exist\n')


def test_a_machine_without_kubectl_is_an_error(kubectl: FakeKubectl, work: Path) -> None:
    kubectl.program.unlink()
    ran = kubectl.run("check node-1", directory=work)
    assert (ran.code, ran.error) == (
        3, f"kubectl nodeagent: {kubectl.program}: not found; install it, or set KUBECTL\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "usage: kubectl nodeagent"),
        ("watch node-1", "watch: the commands are check, explain and snapshot"),
        ("check", "check needs the name of a node: kubectl nodeagent check NODE"),
        ("check a/b/c", "a/b/c: not the name of a node"),
        ("check --signal pid.available node-1", "--signal: write options of the command after NODE"),
        ("check node-1 --context", "--context needs a value"),
    ],
)
def test_a_wrong_command_line_is_one_error_and_calls_nothing(
    kubectl: FakeKubectl, work: Path, line: str, message: str
) -> None:
    ran = kubectl.run(line, directory=work)
    assert ran.code == 64
    assert message in ran.error
    assert kubectl.calls == []


def test_help_is_on_standard_output(kubectl: FakeKubectl, work: Path) -> None:
    ran = kubectl.run("--help", directory=work)
    assert (ran.code, ran.error) == (0, "")
    assert ran.out.startswith(b"usage: kubectl nodeagent [OPTIONS] check|explain|snapshot NODE")


# --- snapshot --------------------------------------------------------------------------------------------------------


def test_a_snapshot_arrives_whole_under_the_name_of_the_node_and_the_time(kubectl: FakeKubectl, work: Path) -> None:
    kubectl.answers(SNAPSHOT)
    ran = kubectl.run("snapshot node-1 --since 1h", directory=work)
    assert (ran.code, ran.error) == (0, "")
    (name,) = files(work)
    assert name.startswith("nodeagent-node-1-20")
    assert ran.out.decode() == f"{name}\n"
    assert (work / name).read_bytes() == SNAPSHOT
    assert kubectl.in_pod == [
        *("nodeagent", "snapshot", "--host-root", "/host", "--config", "/etc/nodeagent/config.yaml"),
        *("--since", "1h", "--output", "-"),
    ]


@pytest.mark.parametrize("option", ["-o 'a file'", "--output 'a file'", "--output='a file'", "-o'a file'"])
def test_the_name_of_the_file_can_be_chosen(kubectl: FakeKubectl, work: Path, option: str) -> None:
    kubectl.answers(SNAPSHOT)
    assert kubectl.run(f"snapshot node-1 {option}", directory=work).code == 0
    assert files(work) == ["a file"]


def test_a_snapshot_goes_to_standard_output(kubectl: FakeKubectl, work: Path) -> None:
    kubectl.answers(SNAPSHOT)
    assert kubectl.run("snapshot node-1 -o -", directory=work) == Ran(0, SNAPSHOT, "")
    assert files(work) == []


def test_an_existing_file_stays_without_force(kubectl: FakeKubectl, work: Path) -> None:
    kubectl.answers(SNAPSHOT)
    (work / "file").write_text("mine")
    ran = kubectl.run("snapshot node-1 -o file", directory=work)
    assert (ran.code, ran.error) == (64, "kubectl nodeagent: file: exists already; --force replaces it\n")
    assert (work / "file").read_text() == "mine"
    assert kubectl.run("snapshot node-1 -o file --force", directory=work).code == 0
    assert (work / "file").read_bytes() == SNAPSHOT


def test_a_snapshot_that_failed_leaves_no_file(kubectl: FakeKubectl, work: Path) -> None:
    kubectl.answers(SNAPSHOT, code=3)
    ran = kubectl.run("snapshot node-1", directory=work)
    assert ran.code == 3
    assert ran.error.endswith("kubectl nodeagent: no snapshot of node node-1\n")
    assert files(work) == []


@pytest.mark.parametrize("part", [b"", SNAPSHOT[:-1], SNAPSHOT[:10]])
def test_a_snapshot_that_arrives_incomplete_leaves_no_file(kubectl: FakeKubectl, work: Path, part: bytes) -> None:
    kubectl.answers(part)
    ran = kubectl.run("snapshot node-1 -o file", directory=work)
    assert (ran.code, ran.error) == (3, "kubectl nodeagent: the snapshot arrived incomplete; try again\n")
    assert files(work) == []


def test_a_place_that_cannot_be_written_is_an_error(kubectl: FakeKubectl, work: Path) -> None:
    kubectl.answers(SNAPSHOT)
    ran = kubectl.run("snapshot node-1 -o missing/file", directory=work)
    assert ran.code == 3
    assert ran.error.endswith("kubectl nodeagent: missing/file: cannot be written\n")


def test_the_list_of_snapshots_is_printed(kubectl: FakeKubectl, work: Path) -> None:
    kubectl.answers(b"FILE\n")
    assert kubectl.run("snapshot node-1 --list", directory=work).out == b"FILE\n"
    assert kubectl.in_pod == ["nodeagent", "snapshot", "--host-root", "/host", "--config",
                              "/etc/nodeagent/config.yaml", "--list"]  # fmt: skip


# --- completion ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "candidates"),
    [
        ("''", ["check", "explain", "snapshot", ":4"]),
        ("ch", ["check", "explain", "snapshot", ":4"]),
        ("check ''", ["node-1", "node-2", ":4"]),
        ("--context lab check ''", ["node-1", "node-2", ":4"]),
        ("--context ''", ["lab", "production", ":4"]),
        ("snapshot node-1 -o ''", [":0"]),
        ("explain node-1 ''", [":4"]),
    ],
)
def test_commands_nodes_and_contexts_are_completed(
    kubectl: FakeKubectl, work: Path, line: str, candidates: list[str]
) -> None:
    assert kubectl.run(line, directory=work, program=COMPLETION).out.decode().split() == candidates


def test_the_options_that_are_offered_are_options_of_the_command(kubectl: FakeKubectl, work: Path) -> None:
    for command in ("check", "explain", "snapshot"):
        offered = kubectl.run(f"{command} node-1 -", directory=work, program=COMPLETION).out.decode().split()
        help_text = subprocess.run(
            [sys.executable, "-m", "nodeagent", command, "--help"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        assert len(offered) > 4
        assert [option for option in offered[:-1] if option not in help_text] == []


# --- the files -------------------------------------------------------------------------------------------------------


def test_shellcheck_finds_nothing() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck")
    scripts = [str(PLUGIN), str(COMPLETION)]
    ran = subprocess.run(
        ["shellcheck", "--severity=style", *scripts], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stdout == ""
    assert ran.returncode == 0


@pytest.mark.parametrize("shell", ["dash", "busybox", "bash"])
def test_every_posix_shell_runs_the_plugin(kubectl: FakeKubectl, work: Path, shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"needs {shell}")
    kubectl.answers(SNAPSHOT)
    link = work / "sh"
    link.symlink_to(program)
    assert kubectl.run('snapshot node-1 -o file --context "it\'s"', directory=work, shell=str(link)).code == 0
    assert (work / "file").read_bytes() == SNAPSHOT


def test_the_plugin_finds_the_pods_of_the_daemonset() -> None:
    daemonset = manifests.document_of("DaemonSet")
    text = PLUGIN.read_text()
    template: dict[str, Any] = daemonset["spec"]["template"]
    (label,) = template["metadata"]["labels"].items()
    assert f"namespace={daemonset['metadata']['namespace']}\n" in text
    assert f"selector={'='.join(label)}\n" in text
    (container,) = template["spec"]["containers"]
    assert f"container={container['name']}\n" in text
    arguments = container["args"]
    assert f"host_root={arguments[arguments.index('--host-root') + 1]}\n" in text
    assert f"config={arguments[arguments.index('--config') + 1]}\n" in text


def test_krews_manifest_has_the_hash_of_the_archive_and_the_version(tmp_path: Path) -> None:
    """A change of a file needs `python .ci/krew_archive.py`."""
    archive = tmp_path / "archive.zip"
    copy = tmp_path / "repository"
    for path in (".ci/krew_archive.py", "kubectl-plugin", "LICENSE"):
        target = copy / path
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (REPOSITORY / path).is_dir() else shutil.copy2)(REPOSITORY / path, target)
    subprocess.run([sys.executable, str(copy / ".ci/krew_archive.py"), str(archive)], check=True, timeout=60)
    assert (copy / "kubectl-plugin/nodeagent.yaml").read_text() == MANIFEST.read_text()
    spec = yaml.safe_load(MANIFEST.read_text())["spec"]
    (platform,) = spec["platforms"]
    assert platform["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    assert spec["version"] == f"v{__version__}"
    unpacked = tmp_path / "unpacked"
    shutil.unpack_archive(archive, unpacked)
    assert files(unpacked) == sorted(each["from"] for each in platform["files"])
    assert platform["bin"] in files(unpacked)


def test_both_scripts_can_be_executed() -> None:
    assert all(os.access(path, os.X_OK) for path in (PLUGIN, COMPLETION))
