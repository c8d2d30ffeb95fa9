"""The kustomizations install what daemonset.yaml installs; a component changes what it says."""

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from nodeagent.config import load
from tests.support import chart
from tests.support.manifests import (
    Objects,
    accounts,
    agent_pod,
    as_non_root,
    by_name,
    config_of,
    limited_accounts,
    manifest,
    parse_documents,
    with_brake,
)
from tests.support.paths import REPOSITORY

VERSIONS = ("1.34", "1.35", "1.36")
Kustomize = tuple[str, ...]
"""The command that builds a directory."""


@pytest.fixture(scope="session")
def kustomize() -> Kustomize:
    """The real program: of the system, of `.ci/newer_debian`, or in kubectl."""
    found = shutil.which("kustomize") or shutil.which("kustomize", path=str(REPOSITORY / "build/newer-debian/usr/bin"))
    if found is not None:
        return found, "build"
    kubectl = shutil.which("kubectl")
    if kubectl is not None:
        asked = [kubectl, "version", "--client", "--output=json"]
        version = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout
        if json.loads(version).get("kustomizeVersion", "").startswith("v5."):
            return kubectl, "kustomize"
    pytest.skip("needs kustomize 5 (Debian 13; `.ci/newer_debian build/newer-debian kustomize`)")


def built(kustomize: Kustomize, directory: Path) -> Objects:
    done = subprocess.run([*kustomize, str(directory)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return by_name(parse_documents(done.stdout))


def with_components(kustomize: Kustomize, directory: Path, *names: str, **more: Any) -> Objects:
    """The base with these components, as an overlay of a user, which has more keys."""
    shutil.copytree(REPOSITORY / "kustomize", directory / "kustomize")
    overlay = directory / "kustomize" / "overlays" / "mine"
    overlay.mkdir()
    components = [f"../../components/{name}" for name in names]
    keys = {"resources": ["../../base"], "components": components, **more}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(keys))
    return built(kustomize, overlay)


def test_the_base_renders_the_manifest(kustomize: Kustomize) -> None:
    assert built(kustomize, REPOSITORY / "kustomize" / "base") == manifest()


@pytest.mark.parametrize("mode", ["dry-run", "enforce"])
def test_the_mode_is_a_component(kustomize: Kustomize, tmp_path: Path, mode: str) -> None:
    objects = with_components(kustomize, tmp_path, mode)
    variables = {each["name"]: each for each in agent_pod(objects)["containers"][0]["env"]}
    assert variables["NODEAGENT_MODE"]["value"] == mode
    assert "valueFrom" in variables["NODE_NAME"]


def test_the_brake_component_is_the_patch_of_the_examples(kustomize: Kustomize, tmp_path: Path) -> None:
    assert sorted_mounts(agent_pod(with_components(kustomize, tmp_path, "brake"))) == sorted_mounts(
        with_brake()["spec"]["template"]["spec"]
    )


def test_the_component_for_a_user_without_rights_is_the_patch_of_the_examples(
    kustomize: Kustomize, tmp_path: Path
) -> None:
    pod = agent_pod(with_components(kustomize, tmp_path, "non-root"))
    wanted = as_non_root()["spec"]["template"]["spec"]
    assert sorted_mounts(pod) == sorted_mounts(wanted)
    [container] = pod["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert [each for each in pod["volumes"] if each["name"] == "state"] == [
        {"name": "state", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}}
    ]


def sorted_mounts(pod: dict[str, Any]) -> dict[str, Any]:
    """A merge may put a mount, a variable or a volume first; their order has no effect."""
    found = copy.deepcopy(pod)
    found["containers"][0]["volumeMounts"].sort(key=lambda each: each["mountPath"])
    found["containers"][0]["env"].sort(key=lambda each: each["name"])
    found["volumes"].sort(key=lambda each: each["name"])
    return found


def test_all_components_go_together(kustomize: Kustomize, tmp_path: Path) -> None:
    objects = with_components(
        kustomize,
        tmp_path,
        "dry-run",
        "brake",
        "leases",
        "replacements",
        "node-fit",
        "eviction-request",
        "resize",
        "kubernetes-1.35",
        "monitoring",
        "selinux",
    )
    assert agent_pod(objects)["containers"][0]["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
    assert {("Role", "nodeagent-leases"), ("ClusterRole", "nodeagent-direct"), ("PodMonitor", "nodeagent")} <= set(
        objects
    )


RIGHTS = ("leases", "replacements", "node-fit", "eviction-request", "resize", "kubernetes-1.35")
"""The components with rights."""


@pytest.mark.parametrize("change", [{"namespace": "ops"}, {"namePrefix": "our-"}], ids=lambda each: next(iter(each)))
def test_an_account_that_the_policies_do_not_limit_has_no_right(
    kustomize: Kustomize, tmp_path: Path, change: dict[str, str]
) -> None:
    """kustomize changes the account, and no expression of a policy."""
    objects = with_components(kustomize, tmp_path, *RIGHTS, **change)
    [account] = [each["metadata"] for each in objects.values() if each["kind"] == "ServiceAccount"]
    assert f"system:serviceaccount:{account['namespace']}:{account['name']}" not in accounts(objects)
    assert accounts(objects) == limited_accounts(objects)


def test_with_the_transformer_another_namespace_is_that_of_every_binding_and_of_every_policy(
    kustomize: Kustomize, tmp_path: Path
) -> None:
    objects = with_components(
        kustomize,
        tmp_path,
        *RIGHTS,
        namespace="ops",
        transformers=["../../transformers/namespace"],
    )
    assert accounts(objects) == limited_accounts(objects) == {"system:serviceaccount:ops:nodeagent"}
    before = with_components(kustomize, tmp_path / "before", *RIGHTS)
    for name, made in before.items():
        part = "subjects" if "subjects" in made else "spec"
        if made["kind"] in ("ClusterRoleBinding", *chart.POLICIES):
            moved = yaml.safe_dump(made[part]).replace("serviceaccount:nodeagent:", "serviceaccount:ops:")
            assert objects[name][part] == yaml.safe_load(moved)


@pytest.mark.parametrize("overlay", ["dry-run", "brake"])
@pytest.mark.parametrize("version", VERSIONS)
def test_each_overlay_matches_the_published_schemas(kustomize: Kustomize, overlay: str, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    objects = built(kustomize, REPOSITORY / "kustomize" / "overlays" / overlay)
    for each in objects.values():
        kubernetes_validate.validate(each, version, strict=True)
    load.loads(config_of(objects).encode())
