"""A manifest is distinguished from a configuration, and the configuration in it is validated in place."""

import json
from pathlib import Path

import pytest

from nodeagent.commands import cli
from nodeagent.config import load
from nodeagent.config.problems import ConfigError, Problem
from tests.support.config_files import BAD, HEADER, Wrong, file, problems
from tests.support.paths import REPOSITORY


def indented(text: str, margin: str) -> str:
    return "".join(margin + line if line.strip() else line for line in text.splitlines(keepends=True))


def config_map(text: str, *, margin: str = "    ") -> str:
    """A manifest of two objects whose second holds this text from its 10th line on."""
    top = "apiVersion: v1\nkind: Namespace\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n"
    return top + "data:\n  other: x\n  config.yaml: |\n" + indented(text, margin)


def held(path: Path, text: str) -> tuple[str, load.LoadedConfig | ConfigError | str]:
    path.write_text(text)
    [found] = load.load_embedded(str(path))
    return found


def refused(text: str) -> Problem:
    with pytest.raises(ConfigError) as caught:
        load.loads(text, name="node.yaml")
    [problem] = caught.value.problems
    return problem


def test_the_configuration_in_our_own_manifest_is_found_and_right() -> None:
    [(name, found)] = load.load_embedded(str(REPOSITORY / "daemonset.yaml"))
    assert name.endswith("daemonset.yaml: ConfigMap nodeagent, data.config.yaml")
    assert isinstance(found, load.LoadedConfig)


@pytest.mark.parametrize("margin", ["    ", "   ", "        "])
@pytest.mark.parametrize("wrong", BAD, ids=lambda wrong: wrong.body[:40])
def test_a_problem_in_a_manifest_has_the_key_and_the_line_of_the_manifest(
    wrong: Wrong, margin: str, tmp_path: Path
) -> None:
    [alone] = problems(wrong.body)
    assert alone.origin.line is not None
    assert alone.origin.column is not None
    _, found = held(tmp_path / "all.yaml", config_map(file(wrong.body), margin=margin))
    assert isinstance(found, ConfigError)
    [problem] = found.problems
    assert problem.key == f"ConfigMap a, data.config.yaml: {wrong.key}"
    assert problem.message == alone.message or "line" in alone.message
    assert problem.origin[1:3] == (alone.origin.line + 9, alone.origin.column + len(margin))


def test_a_problem_of_a_configuration_in_quotes_has_its_own_line(tmp_path: Path) -> None:
    data = {"config.yaml": file("mode: maybe")}
    objects = [{"kind": "ConfigMap", "metadata": {"name": "a"}, "data": data}]
    name, found = held(tmp_path / "all.json", json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    assert name.endswith("all.json: ConfigMap a, data.config.yaml")
    assert isinstance(found, ConfigError)
    assert "all.json:1:" in str(found)
    assert "ConfigMap a, data.config.yaml line 3: mode: " in str(found)


def test_a_warning_has_its_place_too(tmp_path: Path) -> None:
    _, found = held(tmp_path / "all.yaml", config_map(file("evictionHard: {}")))
    assert isinstance(found, load.LoadedConfig)
    assert [problem.key for problem in found.warnings] == ["ConfigMap a, data.config.yaml: evictionHard"]


def test_each_configuration_of_a_manifest_is_judged(tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(config_map(HEADER) + "---\n" + config_map(file("mode: maybe")))
    found = [result for _, result in load.load_embedded(str(tmp_path / "all.yaml"))]
    assert [type(result) for result in found] == [load.LoadedConfig, ConfigError]


def test_a_file_without_a_manifest_is_judged_as_it_is(tmp_path: Path) -> None:
    name, found = held(tmp_path / "node.yaml", file("mode: maybe"))
    assert name == str(tmp_path / "node.yaml")
    assert isinstance(found, ConfigError)
    assert [problem.key for problem in found.problems] == ["mode"]
    [(_, found)] = load.load_embedded(str(tmp_path / "none.yaml"))
    assert isinstance(found, ConfigError)


def test_a_manifest_in_place_of_the_configuration_is_one_error_with_the_place_of_the_configuration() -> None:
    problem = refused((REPOSITORY / "daemonset.yaml").read_text())
    assert problem.key == "ConfigMap nodeagent, data.config.yaml"
    assert "these are 16 Kubernetes objects" in problem.message
    assert "copy it into a file of its own" in problem.fix
    lines = (REPOSITORY / "daemonset.yaml").read_text().splitlines()
    assert lines[(problem.origin.line or 0) - 1] == "  config.yaml: |"


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("apiVersion: v1\nkind: Pod\nspec: {}\n", 2, "this is a Pod"),
        ("kind: List\nitems: []\n", 1, "this is a List"),
        ("kind: A\n---\nkind: B\n", 1, "these are 2 Kubernetes objects"),
        ("apiVersion: v1\nkind: ConfigMap\ndata: {config.yaml: hello}\n", 2, "this is a ConfigMap"),
        ("kind: ConfigMap\ndata: NodeAgentConfiguration\nmetadata: x\n", 1, "this is a ConfigMap"),
    ],
)
def test_another_object_is_one_error(text: str, line: int, what: str) -> None:
    problem = refused(text)
    assert problem.origin.line == line
    assert what in problem.message
    assert "kind: NodeAgentConfiguration" in problem.fix


def test_a_file_that_is_meant_as_a_configuration_gets_every_error() -> None:
    with pytest.raises(ConfigError) as caught:
        load.loads("apiVersion: nodeagent.io/v1\nkind: NodeAgentConfig\nmode: maybe\n")
    assert [problem.key for problem in caught.value.problems] == ["apiVersion", "kind", "mode"]
    assert "more than one document" in refused(file("mode: enforce\n---\nkind: Pod\n")).message


# --- what there is nothing to be judged in ----------------------------------------------------------------------------

SHIPPED = {
    "daemonset.yaml": "ConfigMap nodeagent, data.config.yaml: valid",
    "examples/daemonset-brake.yaml": "a DaemonSet, without a configuration of nodeagent",
    "examples/daemonset-non-root.yaml": "a DaemonSet, without a configuration of nodeagent",
    "examples/daemonset-oom-scores.yaml": "a DaemonSet, without a configuration of nodeagent",
    "examples/daemonset-selinux.yaml": "a DaemonSet, without a configuration of nodeagent",
    "examples/eviction-request.yaml": "4 Kubernetes objects (ClusterRole, ClusterRoleBinding, "
    "ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding), without a configuration of nodeagent",
    "examples/fleet-leases.yaml": "4 Kubernetes objects (Role, RoleBinding, ValidatingAdmissionPolicy, "
    "ValidatingAdmissionPolicyBinding), without a configuration of nodeagent",
    "examples/kubelet-compatible.yaml": "valid",
    **{
        f"examples/kubelet/{name}.yaml": "a DaemonSet, without a configuration of nodeagent"
        for name in ("eks", "gke", "k3s", "openshift", "rke2", "talos")
    },
    "examples/kubernetes-1.35.yaml": "2 Kubernetes objects (ClusterRole, ClusterRoleBinding), without a configuration "
    "of nodeagent",
    "examples/node-fit.yaml": "2 Kubernetes objects (ClusterRole, ClusterRoleBinding), without a configuration of "
    "nodeagent",
    "examples/nodeagent.yaml": "valid",
    "examples/pools.yaml": "valid",
    "examples/replacements.yaml": "2 Kubernetes objects (ClusterRole, ClusterRoleBinding), without a configuration of "
    "nodeagent",
    "examples/resize.yaml": "4 Kubernetes objects (ClusterRole, ClusterRoleBinding, ValidatingAdmissionPolicy, "
    "ValidatingAdmissionPolicyBinding), without a configuration of nodeagent",
    "systemd/config.yaml": "valid",
}
"""Every file that this project ships as a configuration or a manifest, and what it is."""


def test_every_shipped_file_is_in_the_table() -> None:
    examples = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "examples").rglob("*") if path.is_file()}
    others = {path.name for path in REPOSITORY.glob("*.yaml")} | {
        f"systemd/{path.name}" for path in REPOSITORY.glob("systemd/*.yaml")
    }
    assert set(SHIPPED) == examples | others


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_every_shipped_file_is_valid_or_described(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "validate", str(REPOSITORY / name)]) == 0
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (f"{REPOSITORY / name}: {SHIPPED[name]}\n", "")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("apiVersion: v1\nkind: Pod\nspec: {}\n", "a Pod"),
        ("apiVersion: v1\nkind: ConfigMap\ndata: {other: hello}\n", "a ConfigMap"),
        ("apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [a]\n", "a Kustomization"),
        ("- {op: replace, path: /spec, value: 1}\n", "a JSON patch"),
        ("apiVersion: v1\nkind: List\nitems: []\n", "a List"),
    ],
)
def test_objects_without_a_configuration_are_described(text: str, what: str, tmp_path: Path) -> None:
    _, found = held(tmp_path / "all.yaml", text)
    assert found == f"{what}, without a configuration of nodeagent"


def test_a_configuration_in_lists_of_lists_and_in_a_patch_is_judged(tmp_path: Path) -> None:
    inner = {"apiVersion": "v1", "kind": "ConfigMap", "data": {"config.yaml": file("mode: maybe")}}
    nested = {"apiVersion": "v1", "kind": "List", "items": [{"kind": "List", "items": [inner]}]}
    for text in (json.dumps(nested), json.dumps(inner)):
        _, found = held(tmp_path / "all.json", text)
        assert isinstance(found, ConfigError)
        assert "mode: " in str(found)


@pytest.mark.parametrize(
    "text",
    [
        "kind: Pod\n",
        "apiVersion: v1\n",
        "- a\n- b\n",
        "apiVersion: v1\nkind: NodeAgentConfig\n",
        "apiVersion: nodeagent.io/v2\nkind: Other\n",
        "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\nevictionHard: {}\n",
        "apiVersion: v1\nkind: Config\nclusters: []\n",
        "apiVersion: v1\nkind: Pod\n---\nmode: enforce\n",
        "apiVersion: v1\nkind: ConfigMap\ndata:\n  c: |\n    apiVersion: nodeagent.io/v1alpha1\n    kind: NodeConfig\n",
        'apiVersion: v1\nkind: ConfigMap\ndata:\n  c: \'{"apiVersion": "nodeagent.io/v1alpha1", "knd": 1}\'\n',
        "",
    ],
)
def test_what_may_be_meant_as_a_configuration_is_an_error_and_not_passed_over(text: str, tmp_path: Path) -> None:
    _, found = held(tmp_path / "all.yaml", text)
    assert isinstance(found, ConfigError)
