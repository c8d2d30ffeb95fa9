"""`nodeagent check --rights` as a command: exit codes, output, options, and credentials of each kind."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from nodeagent.commands import exit_codes
from nodeagent.config.schema import Config, Mode
from nodeagent.kube import rights
from tests.fake_kube import ApiServer, node_object
from tests.support import schemas
from tests.support.paths import REPOSITORY

USED = rights.used_by(Config(mode=Mode.ENFORCE, node_name="n1"))
GRANTED = rights.impersonation_rules(USED)
CONFIG = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\nmode: enforce\n"


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(node=node_object("n1")) as server:
        server.grant("agent", GRANTED)
        yield server


def run(api: ApiServer, tmp_path: Path, *options: str, node: str = "n1") -> "subprocess.CompletedProcess[str]":
    """By the token of a pod on n1, through a kubeconfig."""
    token = api.token_of("kube-system", "agent", node=node)
    config = tmp_path / "nodeagent.yaml"
    config.write_text(CONFIG, encoding="utf-8")
    return run_with("--kubeconfig", str(api.kubeconfig(tmp_path / "kubeconfig", token=token)), *options, config=config)


def run_with(*options: str, config: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "nodeagent", "check", "--rights", "--config", str(config), *options]
    environment = {"PATH": "/usr/bin:/bin", "NODE_NAME": "n1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=REPOSITORY, env=environment
    )


def test_complete_rights_exit_with_0_and_print_a_table(api: ApiServer, tmp_path: Path) -> None:
    done = run(api, tmp_path)
    assert (done.returncode, done.stderr) == (exit_codes.OK, "")
    first, second = done.stdout.splitlines()[:2]
    assert first.startswith("OK n1: the credentials have the ")
    assert second.startswith("system:serviceaccount:kube-system:agent: requests about pods are sent as the node")
    assert "as system:node:n1, ClusterRole kube-system-agent" in done.stdout


def test_each_state_has_its_exit_code(api: ApiServer, tmp_path: Path) -> None:
    api.grant("agent", GRANTED | {("get", "", "secrets")})
    more = run(api, tmp_path)
    assert more.returncode == exit_codes.WARNING == 1
    assert "get secrets: more than needed" in more.stdout
    api.grant("agent", GRANTED - {("impersonate-on:associated-node:create", "", "pods/eviction")})
    less = run(api, tmp_path)
    assert less.returncode == exit_codes.CRITICAL == 2
    assert less.stdout.startswith('CRITICAL n1: missing rule: apiGroups: [""], resources: [pods/eviction], verbs: ')
    assert "\ncreate pods/eviction: no pod is evicted\n" in less.stdout
    api.go_down()
    gone = run(api, tmp_path)
    assert (gone.returncode, gone.stdout) == (exit_codes.UNKNOWN, "")
    assert gone.stderr.startswith("nodeagent: UNKNOWN: the API server did not answer: cannot connect")


def test_json_and_yaml_are_the_same_report(api: ApiServer, tmp_path: Path) -> None:
    document = json.loads(run(api, tmp_path, "-o", "json").stdout)
    assert list(schemas.strict(schemas.RIGHTS_SCHEMA_FILE).iter_errors(document)) == []
    assert yaml.safe_load(run(api, tmp_path, "-o", "yaml").stdout) == document
    assert (document["state"], document["node"], document["requestMode"]) == ("ok", "n1", "impersonation")


@pytest.mark.parametrize(("minor", "files"), [(36, ()), (35, ("kubernetes-1.35.yaml",))])
def test_the_installed_manifests_give_every_right_and_none_beyond(
    tmp_path: Path, minor: int, files: tuple[str, ...]
) -> None:
    """daemonset.yaml with its own configuration; before 1.36 with the example for that."""
    with ApiServer(node=node_object("n1"), minor=minor) as api:
        for file in (REPOSITORY / "daemonset.yaml", *(REPOSITORY / "examples" / each for each in files)):
            for document in yaml.safe_load_all(file.read_text(encoding="utf-8")):
                if document["kind"] in ("ClusterRole", "ClusterRoleBinding"):
                    api.store.put(document["kind"].lower() + "s", document, "ADDED")
                elif document["kind"] == "ConfigMap":
                    (tmp_path / "config.yaml").write_text(document["data"]["config.yaml"], encoding="utf-8")
        token = api.token_of("nodeagent", "nodeagent", node="n1")
        kubeconfig = str(api.kubeconfig(tmp_path / "kubeconfig", token=token))
        done = run_with("--kubeconfig", kubeconfig, "-o", "json", config=tmp_path / "config.yaml")
    report = json.loads(done.stdout)
    assert (report["state"], report["beyondNeed"]) == ("ok", [])
    assert {each["has"] for each in report["rights"]} <= {"yes", "not asked"}
    assert report["requestMode"] == ("impersonation" if minor == 36 else "account")


def test_nothing_is_changed_and_no_pod_is_read(api: ApiServer, tmp_path: Path) -> None:
    before = api.store.version
    assert run(api, tmp_path).returncode == 0
    assert api.store.version == before
    assert {r.method for r in api.requests if not r.path.endswith("reviews")} == {"GET"}
    assert len(api.requests) < 60


def test_a_nodes_credentials_are_checked_as_such(api: ApiServer, tmp_path: Path) -> None:
    api.tokens["kubelet"] = "system:node:n1"
    config = tmp_path / "nodeagent.yaml"
    config.write_text(CONFIG + "protection: {disruptionBudgets: false}\n", encoding="utf-8")
    done = run_with("--kubeconfig", str(api.kubeconfig(tmp_path / "k", token="kubelet")), config=config)
    assert done.returncode == exit_codes.OK, done.stdout
    assert "every request is sent with the node's own credentials" in done.stdout


@pytest.mark.parametrize(
    "options", [("--signal", "pid.available"), ("--disk",), ("--watch", "1"), ("--no-api",), ("--pods", "x")]
)
def test_options_of_the_other_report_are_wrong_usage(api: ApiServer, tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run(api, tmp_path, *options)
    assert (done.returncode, done.stdout) == (exit_codes.USAGE, "")
    assert done.stderr.startswith("nodeagent: --rights: cannot be combined with ")
    assert api.requests == []


def test_without_credentials_the_result_is_unknown(tmp_path: Path) -> None:
    config = tmp_path / "nodeagent.yaml"
    config.write_text(CONFIG, encoding="utf-8")
    done = run_with(config=config)
    assert (done.returncode, done.stdout) == (exit_codes.UNKNOWN, "")
    assert done.stderr.startswith("nodeagent: UNKNOWN: no API server: ")


def test_an_invalid_configuration_is_reported_as_in_every_command(api: ApiServer, tmp_path: Path) -> None:
    config = tmp_path / "nodeagent.yaml"
    config.write_text(CONFIG + "mode: maybe\n", encoding="utf-8")
    assert run_with(config=config).returncode == exit_codes.CONFIG
