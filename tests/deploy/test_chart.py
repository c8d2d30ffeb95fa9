"""The chart installs what daemonset.yaml installs; an option changes what it says."""

import copy
import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from nodeagent import __version__
from nodeagent.config import load
from nodeagent.config.schema import Config
from tests.support import chart
from tests.support.manifests import (
    BRAKE,
    Objects,
    accounts,
    agent_pod,
    as_non_root,
    by_name,
    config_of,
    container,
    manifest,
    parse_documents,
    read_documents,
    with_brake,
    with_oom_scores,
    with_selinux,
)
from tests.support.paths import REPOSITORY

CHART = chart.CHART
DISTRIBUTIONS = ("kubeadm", "k3s", "rke2", "talos", "openshift", "eks", "gke", "aks")
VERSIONS = ("1.34", "1.35", "1.36")
Render = Callable[..., Objects]
GOPATH = Path("/usr/share/gocode")
needs_go = pytest.mark.skipif(
    shutil.which("go") is None or not (GOPATH / "src/github.com/Masterminds/sprig").is_dir(),
    reason="needs Go, sprig, yaml.v3 (Debian: golang-go golang-github-masterminds-sprig-dev golang-gopkg-yaml.v3-dev)",
)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Helm's template engine, built from Debian's packages of its parts."""
    program = tmp_path_factory.mktemp("helm") / "engine"
    environment = {**os.environ, "GO111MODULE": "off", "GOPATH": str(GOPATH), "GOFLAGS": ""}
    command = ["go", "build", "-o", str(program), "./tests/deploy/helm_engine"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return program


class RenderError(Exception):
    """What helm prints."""


@functools.cache
def schema() -> jsonschema.protocols.Validator:
    read = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    kind = jsonschema.validators.validator_for(read)
    kind.check_schema(read)
    return kind(read)


@pytest.fixture
def render(engine: Path) -> Render:
    def rendered(*, namespace: str = "nodeagent", version: str = "v1.36.2", **values: Any) -> Objects:
        merged = merge(read_documents(CHART / "values.yaml")[0], values)
        schema().validate(merged)
        about = read_documents(CHART / "Chart.yaml")[0]
        given = {
            "Values": merged,
            "Release": {"Name": "r", "Namespace": namespace, "Service": "Helm"},
            "Chart": {key[0].upper() + key[1:]: value for key, value in about.items()},
            "Capabilities": {"KubeVersion": {"Version": version}},
        }
        done = subprocess.run(
            [str(engine), str(CHART)], input=json.dumps(given), capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise RenderError(done.stderr)
        texts = json.loads(done.stdout)
        texts.pop("NOTES.txt")
        return by_name([each for text in texts.values() for each in parse_documents(text)])

    return rendered


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """As helm merges --set over values.yaml."""
    merged = copy.deepcopy(old)
    for key, value in new.items():
        mergeable = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if mergeable else value
    return merged


def bare(objects: Objects) -> Objects:
    """Without the labels of helm, and with the configuration as it is read."""
    found = copy.deepcopy(objects)
    for each in found.values():
        each["metadata"].pop("labels", None)
        if each["kind"] == "ConfigMap":
            each["data"]["config.yaml"] = yaml.safe_load(each["data"]["config.yaml"])
    return found


@pytest.mark.parametrize("name", chart.files())
def test_what_is_generated_is_current(name: str) -> None:
    """`python -m tests.support.chart` writes it."""
    assert (REPOSITORY / name).read_text("utf-8") == chart.files()[name]


def test_the_chart_has_the_version_of_the_package() -> None:
    about = read_documents(CHART / "Chart.yaml")[0]
    assert about["version"] == about["appVersion"] == __version__


# --- helm ------------------------------------------------------------------------------------------------------------


@needs_go
def test_with_its_defaults_the_chart_renders_the_objects_of_the_manifest(render: Render) -> None:
    wanted = bare(manifest())
    wanted.pop(("Namespace", "nodeagent"))
    assert bare(render()) == wanted


@needs_go
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_distribution_mounts_its_paths_and_its_configuration_is_valid(distribution: str, render: Render) -> None:
    objects = render(distribution=distribution)
    pod = agent_pod(objects)
    volumes = {each["name"]: each.get("hostPath", {}).get("path") for each in pod["volumes"]}
    mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    for name, path in volumes.items():
        if path and name != "state":
            assert mounts[name] == f"/host{path}"
    loaded = load.loads(config_of(objects).encode())
    if distribution in ("k3s", "rke2"):
        assert loaded.config.sampling.image_dir == volumes["images"]
    assert (distribution == "gke") == (("ResourceQuota", "nodeagent-priority-class") in objects)


@needs_go
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("distribution", ["kubeadm", "gke"])
def test_every_object_matches_the_published_schemas(version: str, distribution: str, render: Render) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    everything = render(
        distribution=distribution,
        version=f"v{version}.0",
        brake={"enabled": True, "cgroupV1": True},
        config={"fleet": {"maxConcurrentEvictions": 2}, "escalation": {"onBlocked": "delete"}},
        podAnnotations={"a": "b"},
        podLabels={"c": "d"},
        imagePullSecrets=[{"name": "pull"}],
    )
    for each in everything.values():
        kubernetes_validate.validate(each, version, strict=True)
    assert len(everything) > 15


@needs_go
def test_the_mode_replaces_that_of_the_configuration(render: Render) -> None:
    variables = {each["name"]: each.get("value") for each in agent_pod(render(mode="dry-run"))["containers"][0]["env"]}
    assert variables["NODEAGENT_MODE"] == "dry-run"


@needs_go
def test_a_brake_renders_the_patch_of_the_examples(render: Render) -> None:
    rendered = bare(render(brake={"enabled": True, "cgroupV1": True}))["DaemonSet", "nodeagent"]
    wanted = with_brake()
    wanted["metadata"].pop("labels")
    assert rendered == wanted
    without = agent_pod(render(brake={"enabled": True}))["containers"][0]["securityContext"]["capabilities"]["add"]
    assert "KILL" not in without
    assert BRAKE.is_file()


@needs_go
def test_the_right_for_oom_scores_renders_the_patch_of_the_examples(render: Render) -> None:
    rendered = bare(render(oomScoreAdj=True))["DaemonSet", "nodeagent"]
    wanted = with_oom_scores()
    wanted["metadata"].pop("labels")
    assert rendered == wanted


@needs_go
@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({}, None),
        ({"seLinuxType": "spc_t"}, "spc_t"),
        ({"distribution": "openshift"}, "spc_t"),
        ({"distribution": "openshift", "seLinuxType": ""}, None),
        ({"distribution": "openshift", "seLinuxType": "own_t"}, "own_t"),
    ],
)
def test_the_selinux_type_is_that_of_the_values_or_of_openshift(
    render: Render, values: dict[str, str], wanted: str | None
) -> None:
    context = container(render(**values)["DaemonSet", "nodeagent"])["securityContext"]
    assert context.get("seLinuxOptions") == ({"type": wanted} if wanted else None)


@needs_go
def test_the_selinux_type_renders_the_patch_of_the_examples(render: Render) -> None:
    rendered = bare(render(seLinuxType="spc_t"))["DaemonSet", "nodeagent"]
    wanted = with_selinux()
    wanted["metadata"].pop("labels")
    assert rendered == wanted


@needs_go
def test_a_user_without_rights_renders_the_patch_of_the_examples(render: Render) -> None:
    rendered = bare(render(nonRoot=True))["DaemonSet", "nodeagent"]
    wanted = as_non_root()
    wanted["metadata"].pop("labels")
    assert rendered == wanted


@needs_go
@pytest.mark.parametrize("values", [{"mode": "enforce"}, {"brake": {"enabled": True}}])
def test_a_user_without_rights_evicts_and_brakes_nothing(render: Render, values: dict[str, Any]) -> None:
    with pytest.raises(RenderError, match="nonRoot is a dry run"):
        render(nonRoot=True, **values)


@needs_go
def test_rights_follow_the_version_and_the_configuration(render: Render) -> None:
    def rules(objects: Objects) -> list[Any]:
        found: list[Any] = objects["ClusterRole", "nodeagent"]["rules"]
        return found

    default = render()
    assert ("ClusterRole", "nodeagent-direct") not in default
    assert ("ClusterRole", "nodeagent-direct") in render(version="v1.35.1")
    assert ("ClusterRole", "nodeagent-direct") in render(directRights=True)
    assert ("ClusterRole", "nodeagent-direct") not in render(directRights=False, version="v1.35.1")
    deleting = render(config={"escalation": {"onBlocked": "delete"}})
    added = [rule for rule in rules(deleting) if rule not in rules(default)]
    assert [(rule["resources"], rule["verbs"]) for rule in added] == [
        (["pods/status"], ["patch"]),
        (["pods"], ["delete"]),
    ]
    assert ("Role", "nodeagent-leases") not in default
    fleet = render(config={"fleet": {"maxConcurrentEvictions": 2}})
    assert ("Role", "nodeagent-leases") in fleet
    assert ("ValidatingAdmissionPolicy", "nodeagent-leases") in fleet
    assert ("ClusterRole", "nodeagent-replacements") not in default
    off = render(
        config={
            "protection": {"replacementWait": "0s"},
            "profiles": [{"name": "batch", "nodeSelector": {"pool": "batch"}}],
        }
    )
    assert ("ClusterRole", "nodeagent-replacements") not in off
    waiting = render(config={"protection": {"replacementWait": "10m"}})
    assert waiting["ClusterRole", "nodeagent-replacements"]["rules"][0]["verbs"] == ["get"]
    assert ("ClusterRoleBinding", "nodeagent-replacements") in waiting
    assert ("ClusterRole", "nodeagent-node-fit") not in default
    fitting = render(config={"protection": {"nodeFit": True}})
    assert fitting["ClusterRole", "nodeagent-node-fit"]["rules"][0]["verbs"] == ["list"]
    assert ("ClusterRoleBinding", "nodeagent-node-fit") in fitting
    assert ("ClusterRole", "nodeagent-eviction-request") not in default
    asking = render(config={"evictionRequest": {"enabled": True}})
    assert asking["ClusterRole", "nodeagent-eviction-request"]["rules"][0]["verbs"] == ["create", "get", "patch"]
    assert ("ValidatingAdmissionPolicy", "nodeagent-eviction-requests") in asking
    assert ("ClusterRole", "nodeagent-resize") not in default
    resizing = {"ownLimit": {"enabled": True, "resize": {"enabled": True, "namespaces": ["shop"]}}}
    raised = render(config=resizing)
    assert raised["ClusterRole", "nodeagent-resize"]["rules"][0]["resources"] == ["pods/resize"]
    assert ("ClusterRoleBinding", "nodeagent-resize") in raised
    assert ("ValidatingAdmissionPolicyBinding", "nodeagent-resize") in raised
    bare = render(config=resizing, admissionPolicies=False)
    assert not [kind for kind, _ in bare if kind.startswith("ValidatingAdmission")]
    assert not [kind for kind, _ in render(admissionPolicies=False) if kind.startswith("ValidatingAdmission")]


@needs_go
def test_another_namespace_is_the_one_of_every_object_and_of_every_policy(render: Render) -> None:
    objects = render(namespace="ops")
    text = yaml.safe_dump_all(objects.values())
    assert "system:serviceaccount:ops:nodeagent" in text
    assert "system:serviceaccount:nodeagent:" not in text
    assert {each["metadata"]["namespace"] for each in objects.values() if "namespace" in each["metadata"]} == {"ops"}
    assert accounts(objects) == {"system:serviceaccount:ops:nodeagent"}


IN_A_PROFILE: tuple[tuple[dict[str, Any], tuple[str, str]], ...] = (
    ({"escalation": {"onBlocked": "delete"}}, ("ClusterRole", "nodeagent")),
    ({"protection": {"replacementWait": "10m"}}, ("ClusterRoleBinding", "nodeagent-replacements")),
    ({"protection": {"nodeFit": True}}, ("ClusterRoleBinding", "nodeagent-node-fit")),
    ({"evictionRequest": {"enabled": True}}, ("ValidatingAdmissionPolicy", "nodeagent-eviction-requests")),
    (
        {"ownLimit": {"enabled": True, "resize": {"enabled": True, "namespaces": ["shop"]}}},
        ("ValidatingAdmissionPolicy", "nodeagent-resize"),
    ),
)


@needs_go
@pytest.mark.parametrize(("keys", "name"), IN_A_PROFILE, ids=lambda each: each[1] if isinstance(each, tuple) else "")
def test_a_key_of_one_profile_brings_the_rights_that_it_needs(
    render: Render, keys: dict[str, Any], name: tuple[str, str]
) -> None:
    in_the_file = render(config=keys)
    in_a_profile = render(
        config={
            "escalation": {"onBlocked": "wait"},
            "profiles": [
                {"name": "a", "nodeSelector": {"pool": "a"}, "evictionRequest": None},
                {"name": "b", "nodeSelector": {"pool": "b"}, **keys},
            ],
        }
    )
    assert in_a_profile.keys() == in_the_file.keys()
    assert in_a_profile[name] == in_the_file[name] != render().get(name)


@needs_go
def test_in_another_namespace_the_agent_protects_it_and_has_its_leases_there(render: Render) -> None:
    def configured(objects: Objects) -> Config:
        return load.loads(config_of(objects).encode()).config

    fleet = {"maxConcurrentEvictions": 2}
    objects = render(namespace="ops", config={"fleet": fleet, "protection": {"nodeFit": False}})
    assert configured(objects).fleet.lease_namespace == "ops"
    assert configured(objects).protection.namespaces == ("kube-system", "ops")
    assert objects["Role", "nodeagent-leases"]["metadata"]["namespace"] == "ops"
    chosen = {"fleet": {**fleet, "leaseNamespace": "slots"}, "protection": {"namespaces": []}}
    for namespace in ("ops", "nodeagent"):
        objects = render(namespace=namespace, config=chosen)
        assert configured(objects).fleet.lease_namespace == "slots"
        assert configured(objects).protection.namespaces == ()
        assert objects["Role", "nodeagent-leases"]["metadata"]["namespace"] == "slots"
        assert objects["RoleBinding", "nodeagent-leases"]["metadata"]["namespace"] == "slots"
    objects = render(namespace="ops", config={"fleet": None, "protection": None})
    assert configured(objects).fleet.lease_namespace == "ops"
    assert configured(objects).protection.namespaces == ("kube-system", "ops")


@needs_go
@pytest.mark.parametrize("address", [":9100", "0.0.0.0:9100", "[::]:9100"])
def test_the_probes_ask_the_port_of_the_endpoint(render: Render, address: str) -> None:
    [container] = agent_pod(render(config={"metrics": {"address": address}}))["containers"]
    [port] = container["ports"]
    assert port["containerPort"] == 9100
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == port["name"]


@needs_go
@pytest.mark.parametrize("address", ["", "127.0.0.1:9655", "localhost:9655", "[::1]:9655", "192.0.2.7:9655", ":0"])
def test_an_endpoint_that_no_probe_can_reach_is_refused(render: Render, address: str) -> None:
    with pytest.raises(RenderError, match="the probes need a port"):
        render(config={"metrics": {"address": address}})


@needs_go
def test_on_openshift_the_account_may_use_the_constraints_that_its_pods_need(render: Render) -> None:
    assert ("RoleBinding", "nodeagent-scc") not in render()
    binding = render(distribution="openshift", namespace="ops")["RoleBinding", "nodeagent-scc"]
    assert binding["metadata"]["namespace"] == "ops"
    assert binding["roleRef"]["name"] == "system:openshift:scc:privileged"
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "nodeagent", "namespace": "ops"}]


@needs_go
def test_objects_of_the_prometheus_operator_come_on_request(render: Render) -> None:
    objects = render(monitoring={"podMonitor": True, "rules": True, "labels": {"release": "prom"}})
    own = by_name(read_documents(REPOSITORY / "monitoring" / "prometheusrule.yaml"))
    assert objects["PrometheusRule", "nodeagent"]["spec"] == own["PrometheusRule", "nodeagent"]["spec"]
    assert objects["PodMonitor", "nodeagent"]["metadata"]["labels"]["release"] == "prom"
    monitor = read_documents(REPOSITORY / "monitoring" / "podmonitor.yaml")[0]
    assert objects["PodMonitor", "nodeagent"]["spec"] == monitor["spec"]


@needs_go
def test_a_digest_stands_beside_the_tag(render: Render) -> None:
    digest = "sha256:" + "a" * 64
    image = {"repository": "example.org/nodeagent", "tag": "x", "digest": digest}
    assert agent_pod(render(image=image))["containers"][0]["image"] == f"example.org/nodeagent:x@{digest}"


@pytest.mark.parametrize(
    "values",
    [
        {"config": {"evictionHart": {}}},
        {"config": {"mode": "on"}},
        {"distribution": "windows"},
        {"unknown": 1},
        {"image": {"digest": "sha256:1"}},
    ],
)
def test_a_wrong_value_fails_the_installation(values: dict[str, Any]) -> None:
    merged = merge(read_documents(CHART / "values.yaml")[0], values)
    with pytest.raises(jsonschema.ValidationError):
        schema().validate(merged)
