"""daemonset.yaml installs as it is, and asks for what the code uses and nothing else."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from nodeagent import __version__
from nodeagent.config.own_limit import OwnLimitConfig, ResizeConfig
from nodeagent.config.schema import (
    Config,
    EscalationConfig,
    EvictionRequestConfig,
    FleetConfig,
    Mode,
    OnBlocked,
    ProtectionConfig,
)
from nodeagent.kube import rights
from nodeagent.kube.impersonation import IMPERSONATED
from nodeagent.kube.rights import Rule
from nodeagent.sampling.node import kubelet_config
from tests.support.manifests import (
    DAEMONSET,
    KUBELET_PATCHES,
    Document,
    container,
    direct_rights,
    document_of,
    documents,
    pod_spec,
    read_documents,
    with_brake,
    with_kubelet_files,
    with_oom_scores,
)
from tests.support.paths import REPOSITORY

API_PACKAGES: Final = [REPOSITORY / "nodeagent" / each for each in ("kube", "actuators")]

RIGHTS_OF_PATHS: Final = {
    # What the code sends, with {} for what it fills in: the rights it takes (nodeagent.kube.rights).
    "/api/v1/pods": {"list pods", "watch pods"},
    "/api/v1/nodes": {"list nodes", "watch nodes"},
    "/api/v1/nodes/{}": {"get nodes", "patch nodes"},
    "/api/v1/nodes/{}/status": {"patch nodes/status"},
    "/api/v1/nodes/{}/proxy/configz": {"get nodes/proxy"},
    "/api/v1/namespaces/{}/pods": {"list pods"},
    "/api/v1/namespaces/{}/pods/{}": {"delete pods"},
    "/api/v1/namespaces/{}/pods/{}/eviction": {"create pods/eviction"},
    "/api/v1/namespaces/{}/pods/{}/status": {"patch pods/status"},
    "/api/v1/namespaces/{}/pods/{}/resize": {"patch pods/resize"},
    "/apis/apps/v1/namespaces/{}/replicasets/{}": {"get replicasets.apps"},
    "/apis/apps/v1/namespaces/{}/statefulsets/{}": {"get statefulsets.apps"},
    "/apis/policy/v1/namespaces/{}/poddisruptionbudgets": {
        "list poddisruptionbudgets.policy",
        "watch poddisruptionbudgets.policy",
    },
    "/api/v1/namespaces/{}/persistentvolumeclaims/{}": {"get persistentvolumeclaims"},
    "/api/v1/persistentvolumes/{}": {"get persistentvolumes"},
    "/apis/events.k8s.io/v1/namespaces/{}/events": {"create events.events.k8s.io", "patch events.events.k8s.io"},
    "/api/v1/namespaces/{}/events": {"create events", "patch events"},
    "/apis/coordination.k8s.io/v1/namespaces/{}/leases": {
        "list leases.coordination.k8s.io",
        "create leases.coordination.k8s.io",
        "update leases.coordination.k8s.io",
    },
    "/apis/lifecycle.k8s.io/v1alpha1": set(),  # ClusterRole system:discovery lets every authenticated user
    "/apis/lifecycle.k8s.io/v1alpha1/namespaces/{}/evictionrequests": {
        "create evictionrequests.lifecycle.k8s.io",
        "get evictionrequests.lifecycle.k8s.io",
        "patch evictionrequests.lifecycle.k8s.io",
    },
    "/apis/authentication.k8s.io/v1/selfsubjectreviews": {"create selfsubjectreviews.authentication.k8s.io"},
    "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews": {"create selfsubjectaccessreviews.authorization.k8s.io"},
    "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews": {"create selfsubjectrulesreviews.authorization.k8s.io"},
}
INSTALLED: Final = Config(mode=Mode.ENFORCE, node_name="n1")
"""What the ClusterRole is for: the name comes from the downward API."""
OVERRIDING: Final = INSTALLED._replace(escalation=EscalationConfig(on_blocked=OnBlocked.DELETE))
WAITING: Final = INSTALLED._replace(protection=ProtectionConfig(replacement_wait_s=600.0))
FITTING: Final = INSTALLED._replace(protection=ProtectionConfig(node_fit=True))
ASKING: Final = INSTALLED._replace(eviction_request=EvictionRequestConfig(enabled=True))
RESIZING: Final = INSTALLED._replace(own_limit=OwnLimitConfig(enabled=True, resize=ResizeConfig(enabled=True)))
FLEET: Final = INSTALLED._replace(fleet=FleetConfig(max_concurrent_evictions=1))

CAPABILITIES: Final = {
    "DAC_READ_SEARCH": ("nodeagent/sampling/disk", r"scandir|openat|dir_fd|os\.open"),
    "IPC_LOCK": ("nodeagent/runtime/self_protection.py", r"mlockall"),
}
"""Each capability that the container adds, and the code that uses it."""

NOT_MOUNTED: Final = {
    "/var/lib": "opened on the way down only",
    "/var/log": "as above",
    "/etc/hostname": "NODE_NAME has the name",
    "/etc/containerd/config.toml": "sampling.imageDir has the path if the root was moved",
    "/etc/crio/crio.conf": "as above",
    "/etc/crio/crio.conf.d": "as above",
    "/etc/containers/storage.conf": "as above",
    "/run/containerd/containerd.sock": "only asked whether it exists; the runtime's socket would be root on the node",
    "/run/crio/crio.sock": "as above",
    "/var/lib/containers/storage": "CRI-O: the comment at the volume describes the change",
    "/sys/module/zswap/parameters/enabled": "a fact for people in recordings",
    "/sys/module/zswap/parameters/max_pool_percent": "as above",
    "/etc/os-release": "only to recognise Talos, whose OOM handler has no process of its own",
    **dict.fromkeys(
        (*kubelet_config.USUAL_FILES, *kubelet_config.USUAL_DIRECTORIES),
        "the kubelet's settings: a patch of examples/kubelet mounts them",
    ),
    "/etc/systemd/system": "units' settings for systemd-oomd: in the container only its process shows it",
    "/run/systemd/system": "as above",
    "/run/systemd/system.control": "as above",
    "/run/systemd/transient": "as above",
    "/run/systemd/oom": "as above",
    "/sys/block/": "zram: sysfs is not namespaced, and the container has its own",
    "/sys/dev/block/": "which disk a partition is on; a partition that is unknown stands for itself",
    "/var/lib/docker": "no runtime of a kubelet since 1.24",
}
"""Host paths that the code knows and the pod does without."""


def schema_validator() -> Any:
    return pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate (dependency group test)")


@pytest.mark.parametrize("version", ["1.30", "1.33", "1.36", "1.37"])
def test_every_document_is_valid_by_the_published_schemas_and_has_no_unknown_field(version: str) -> None:
    validate = schema_validator().validate
    patched = [with_kubelet_files(each.stem) for each in KUBELET_PATCHES.iterdir()]
    for document in (*documents(), *direct_rights(), with_brake(), with_oom_scores(), *patched):
        assert validate(document, version, strict=True) == version


def test_a_misspelt_field_would_be_found() -> None:
    kubernetes_validate = schema_validator()
    wrong = document_of("DaemonSet")
    wrong["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.36", strict=True)


def test_every_name_that_one_document_gives_another_exists() -> None:
    made = {(document["kind"], document["metadata"]["name"]) for document in documents()}
    binding, spec = document_of("ClusterRoleBinding"), pod_spec()
    account = spec["serviceAccountName"]
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in made
    user = f"system:serviceaccount:{document_of('Namespace')['metadata']['name']}:{account}"
    assert binding["subjects"] == [{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": user}]
    assert ("ServiceAccount", account) in made
    assert {("ConfigMap", v["configMap"]["name"]) for v in spec["volumes"] if "configMap" in v} <= made
    bound = {d["spec"]["policyName"] for d in documents() if d["kind"] == "ValidatingAdmissionPolicyBinding"}
    assert bound == {name for kind, name in made if kind == "ValidatingAdmissionPolicy"}
    selector = document_of("DaemonSet")["spec"]["selector"]["matchLabels"].items()
    assert selector <= document_of("DaemonSet")["spec"]["template"]["metadata"]["labels"].items()
    namespaces = {document["metadata"].get("namespace") for document in documents()} - {None}
    assert namespaces == {document_of("Namespace")["metadata"]["name"]}
    assert {volume["name"] for volume in spec["volumes"]} == {mount["name"] for mount in container()["volumeMounts"]}


# --- rights ----------------------------------------------------------------------------------------------------------


def texts(module: Path) -> Iterator[str]:
    """Every string in a module, f-strings as one with {} for each expression."""
    within: set[int] = set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):  # a node comes before what is in it
        if isinstance(node, ast.JoinedStr):
            within.update(id(part) for part in node.values)
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in within:
            yield node.value


def request_paths() -> Iterator[tuple[str, str]]:
    """(path, module) for every API path in `kube` and `actuators`. `f"{base}/tail"` counts with each base of its module
    that names an object."""
    for module in sorted(path for package in API_PACKAGES for path in package.rglob("*.py")):
        found = {text.partition("?")[0] for text in texts(module) if re.match(r"/apis?/", text)}
        tails = {match[1] for text in texts(module) if (match := re.fullmatch(r"\{\}((?:/[a-z]+)+)(?:\{\})?", text))}
        yield from ((path, module.name) for path in found)
        yield from ((path + tail, module.name) for path in found for tail in tails if path.endswith("}"))


def rules_of(role: Document) -> list[Rule]:
    return [
        Rule(verb, group, resource)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]


def rules_for(config: Config) -> frozenset[Rule]:
    return rights.direct_rules(rights.used_by(config))


def test_the_role_grants_exactly_what_an_account_needs_that_impersonates_its_node() -> None:
    wanted = rights.impersonation_rules(rights.used_by(INSTALLED))
    assert sorted(rules_of(document_of("ClusterRole"))) == sorted(wanted)


def test_the_role_lets_the_account_itself_neither_list_nor_evict_a_pod() -> None:
    own = [rule for rule in rules_of(document_of("ClusterRole")) if not rule.verb.startswith("impersonate")]
    assert not IMPERSONATED & set(own)
    assert not [rule for rule in own if rule.resource.startswith("pods")]


def test_no_rule_lets_the_account_impersonate_anything_but_the_node_of_its_token() -> None:
    """The server checks `impersonate:associated-node` for the name `*`: a rule with names would grant nothing."""
    impersonating = [rule for rule in rules_of(document_of("ClusterRole")) if rule.verb.startswith("impersonate")]
    assert all(re.fullmatch(r"impersonate(-on)?:associated-node(:[a-z]+)?", rule.verb) for rule in impersonating)
    assert not [rule for rule in document_of("ClusterRole")["rules"] if "resourceNames" in rule]


def test_the_example_for_older_servers_adds_exactly_the_direct_rights_that_the_role_lacks() -> None:
    role, binding = direct_rights()
    assert sorted(rules_of(role)) == sorted(rules_for(INSTALLED) - set(rules_of(document_of("ClusterRole"))))
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("ClusterRole", role["metadata"]["name"])
    assert binding["subjects"] == document_of("ClusterRoleBinding")["subjects"]
    names = {(each["kind"], each["metadata"]["name"]) for each in documents()}
    assert not {(each["kind"], each["metadata"]["name"]) for each in direct_rights()} & names


def test_no_right_is_a_wildcard_and_none_reads_secrets() -> None:
    for rule in (*document_of("ClusterRole")["rules"], *direct_rights()[0]["rules"]):
        assert "*" not in rule["apiGroups"] + rule["resources"] + rule["verbs"]
        assert not {"secrets", "configmaps", "nodes/proxy", "pods/exec"} & set(rule["resources"])


def test_every_path_that_the_code_requests_has_its_right() -> None:
    unknown = {(path, module) for path, module in request_paths() if path not in RIGHTS_OF_PATHS}
    assert not unknown


def test_every_right_is_for_a_path_that_the_code_requests() -> None:
    requested = {path for path, _ in request_paths()}
    assert not RIGHTS_OF_PATHS.keys() - requested
    for_everybody = {f"create {rights.resource_name(*each)}" for each in rights.EVERYBODY}
    table = {right.name for right in (*rights.RIGHTS, *rights.NODE_EVENTS, rights.CONFIGZ)}
    assert set().union(*RIGHTS_OF_PATHS.values()) - for_everybody == table - for_everybody


def test_the_optional_rights_stand_commented_where_they_are_needed() -> None:
    text = DAEMONSET.read_text(encoding="utf-8")
    commented = "\n".join(re.findall(r"^  # (- apiGroups.*|  (?:resources|verbs):.*)$", text, re.MULTILINE))
    rules = rules_of({"rules": yaml.safe_load(commented)})
    assert sorted(rules) == sorted({*(rules_for(OVERRIDING) - rules_for(INSTALLED)), rights.CONFIGZ.rule})


def test_the_leases_of_a_fleet_are_granted_in_the_agents_own_namespace_alone() -> None:
    made = read_documents(REPOSITORY / "examples" / "fleet-leases.yaml")
    role, binding = made[:2]
    policy = ["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"]
    assert [each["kind"] for each in made] == ["Role", "RoleBinding", *policy]
    assert sorted(rules_of(role)) == sorted(rules_for(FLEET) - rules_for(INSTALLED))
    home = document_of("Namespace")["metadata"]["name"]
    assert {role["metadata"]["namespace"], binding["metadata"]["namespace"], FleetConfig().lease_namespace} == {home}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == document_of("ClusterRoleBinding")["subjects"]


def test_the_rights_to_read_owners_are_apart_and_of_single_objects() -> None:
    role, binding = read_documents(REPOSITORY / "examples" / "replacements.yaml")
    assert sorted(rules_of(role)) == sorted(rules_for(WAITING) - rules_for(INSTALLED))
    assert {rule.verb for rule in rules_of(role)} == {"get"}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == document_of("ClusterRoleBinding")["subjects"]


def test_the_rights_to_read_other_nodes_are_apart_and_only_list() -> None:
    role, binding = read_documents(REPOSITORY / "examples" / "node-fit.yaml")
    beside_the_node = rights.impersonation_rules(rights.used_by(FITTING))
    assert sorted(rules_of(role)) == sorted(beside_the_node - rights.impersonation_rules(rights.used_by(INSTALLED)))
    assert {rule.verb for rule in rules_of(role)} == {"list"}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == document_of("ClusterRoleBinding")["subjects"]


def test_the_rights_of_eviction_requests_are_apart_and_delete_nothing() -> None:
    role, binding, *_ = read_documents(REPOSITORY / "examples" / "eviction-request.yaml")
    asking = rights.impersonation_rules(rights.used_by(ASKING))
    assert sorted(rules_of(role)) == sorted(asking - rights.impersonation_rules(rights.used_by(INSTALLED)))
    assert {rule.verb for rule in rules_of(role)} == {"create", "get", "patch"}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == document_of("ClusterRoleBinding")["subjects"]


def test_the_right_to_resize_is_apart_and_has_its_policy() -> None:
    made = read_documents(REPOSITORY / "examples" / "resize.yaml")
    role, binding = made[:2]
    policy = ["ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"]
    assert [each["kind"] for each in made] == ["ClusterRole", "ClusterRoleBinding", *policy]
    assert sorted(rules_of(role)) == sorted(rules_for(RESIZING) - rules_for(INSTALLED))
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == document_of("ClusterRoleBinding")["subjects"]
    [rule] = made[2]["spec"]["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == (["pods/resize"], ["UPDATE"])


# --- the pod ---------------------------------------------------------------------------------------------------------


def test_the_command_line_is_one_that_the_program_accepts() -> None:
    from nodeagent.commands.arguments import parser

    options = parser().parse_args(container()["args"])
    mounts = {mount["mountPath"] for mount in container()["volumeMounts"]}
    assert str(Path(options.config).parent) in mounts
    assert any(mount.startswith(f"{options.host_root}/") for mount in mounts)


def test_a_command_in_the_pod_reads_the_same_host_and_configuration_as_the_agent() -> None:
    from nodeagent.commands.arguments import parser

    options = parser().parse_args(container()["args"])
    values = {entry["name"]: entry["value"] for entry in container()["env"] if "value" in entry}
    assert values == {"NODEAGENT_HOST_ROOT": options.host_root, "NODEAGENT_CONFIG": options.config}


def test_the_pod_gets_its_name_and_its_node() -> None:
    with_fields = [entry for entry in container()["env"] if "valueFrom" in entry]
    fields = {entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in with_fields}
    assert fields == {"NODE_NAME": "spec.nodeName", "POD_UID": "metadata.uid"}


def test_the_image_is_this_version() -> None:
    assert container()["image"].partition("@")[0] == f"nodeagent:{__version__}"


def test_no_cpu_limit_throttles_the_agent_and_its_memory_is_reserved_and_limited() -> None:
    resources = container()["resources"]
    assert resources["limits"].keys() == {"memory"}
    assert resources["requests"].keys() == {"cpu", "memory"}
    assert resources["requests"]["memory"] == resources["limits"]["memory"]


def test_the_kubelet_will_not_evict_the_pod() -> None:
    """Whatever its QoS class: the priority class decides, also about its oom_score_adj."""
    assert pod_spec()["priorityClassName"] == "system-node-critical"


def test_every_taint_is_tolerated() -> None:
    assert {(t["operator"], t["effect"], t.get("key")) for t in pod_spec()["tolerations"]} == {
        ("Exists", "NoSchedule", None),
        ("Exists", "NoExecute", None),
    }


def test_the_container_gives_up_what_it_does_not_use() -> None:
    context = container()["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["privileged"] is False
    assert context["capabilities"]["drop"] == ["ALL"]
    assert pod_spec()["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod_spec()["hostNetwork"] is False


def test_every_capability_is_used_by_the_code_that_is_named_for_it() -> None:
    assert set(container()["securityContext"]["capabilities"]["add"]) == CAPABILITIES.keys()
    for place, fragment in CAPABILITIES.values():
        path = REPOSITORY / place
        modules = [path] if path.is_file() else sorted(path.rglob("*.py"))
        assert any(re.search(fragment, module.read_text(encoding="utf-8")) for module in modules), place


def test_host_paths_are_read_only_but_for_the_state() -> None:
    host_paths = {
        volume["name"]: volume["hostPath"]["path"] for volume in pod_spec()["volumes"] if "hostPath" in volume
    }
    writable = {
        host_paths[mount["name"]]
        for mount in container()["volumeMounts"]
        if mount["name"] in host_paths and not mount.get("readOnly")
    }
    assert writable == {"/run/nodeagent"}


def read_only_with_what_is_below(mount: Document) -> bool:
    """Whether it asks to be; the API server refuses that for a mount that is writable or takes part in propagation."""
    asked: bool = mount.get("recursiveReadOnly", "Disabled") != "Disabled"
    assert not asked or (mount.get("readOnly") is True and "mountPropagation" not in mount), mount
    return asked


def test_hierarchies_below_a_read_only_mount_are_read_only_too() -> None:
    """A plain readOnly leaves mounts below as they are, and with cgroup v1 each hierarchy is one."""
    asked = {mount["name"] for mount in container()["volumeMounts"] if read_only_with_what_is_below(mount)}
    assert asked == {"proc", "cgroup", "kernel-mm", "pod-logs"}


def test_the_patch_for_a_brake_opens_the_cgroups_and_allows_signals_and_nothing_else() -> None:
    plain, patched = document_of("DaemonSet"), with_brake()
    before, after = container(plain), container(patched)
    [cgroup] = [mount for mount in after["volumeMounts"] if not mount.get("readOnly") and mount["name"] == "cgroup"]
    assert not read_only_with_what_is_below(cgroup)
    assert [m for m in after["volumeMounts"] if m["name"] != "cgroup"] == [
        m for m in before["volumeMounts"] if m["name"] != "cgroup"
    ]
    [added] = set(after["securityContext"]["capabilities"]["add"]) - CAPABILITIES.keys()
    assert added == "KILL"
    assert "os.kill(" in (REPOSITORY / "nodeagent" / "actuators" / "cgroup_brake.py").read_text(encoding="utf-8")
    for each in (before, after):  # all the rest is as it was
        del each["volumeMounts"], each["securityContext"]["capabilities"]["add"]
    assert patched == plain


def test_the_patch_for_oom_scores_allows_to_write_other_users_files_and_nothing_else() -> None:
    plain, patched = document_of("DaemonSet"), with_oom_scores()
    before, after = (container(each)["securityContext"]["capabilities"]["add"] for each in (plain, patched))
    assert set(after) - set(before) == {"DAC_OVERRIDE"}
    assert set(before) < set(after)
    after.remove("DAC_OVERRIDE")
    assert patched == plain
    assert pod_spec(plain)["hostPID"], "its own /proc, which is writable, has the processes of the node"


def test_each_host_path_stands_under_the_host_root_and_none_is_wide() -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    for volume in pod_spec()["volumes"]:
        if "hostPath" not in volume:
            continue
        path = volume["hostPath"]["path"]
        assert mounts[volume["name"]] in (f"/host{path}", path)
        assert path not in ("/", "/var", "/var/lib", "/run", "/etc", "/sys", "/dev")


def host_paths_in_code() -> set[str]:
    """Absolute paths of the host that `sampling` names."""
    found = set()
    for module in sorted((REPOSITORY / "nodeagent" / "sampling").rglob("*.py")):
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(re.findall(r"^/(?:proc|sys|var|etc|run)/[^\s*{}]+$", node.value))
    return found


def test_every_path_that_the_samplers_read_is_mounted_or_has_a_reason_not_to_be() -> None:
    mounted = [mount["mountPath"].removeprefix("/host") for mount in container()["volumeMounts"]]
    paths = host_paths_in_code()
    assert "/proc/meminfo" in paths
    missing = {
        path
        for path in paths - NOT_MOUNTED.keys()
        if not any(path == mount or path.startswith(f"{mount}/") for mount in mounted)
    }
    assert not missing


def test_an_update_never_takes_the_agent_from_more_than_a_tenth_of_the_nodes() -> None:
    strategy = document_of("DaemonSet")["spec"]["updateStrategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}}
    assert document_of("DaemonSet")["spec"]["minReadySeconds"] >= 30


# --- configuration ---------------------------------------------------------------------------------------------------


def test_the_config_map_is_the_example_that_systemd_users_get() -> None:
    """But for the address: a pod's own network has no loopback that a kubelet's probe could reach."""
    example = (REPOSITORY / "systemd" / "config.yaml").read_text(encoding="utf-8")
    assert document_of("ConfigMap")["data"] == {"config.yaml": example.replace("127.0.0.1:9655", ":9655")}


def test_the_probes_ask_the_port_that_the_configuration_serves_and_only_a_standing_loop_restarts_the_agent() -> None:
    from nodeagent.config import load

    loaded = load.loads(document_of("ConfigMap")["data"]["config.yaml"])
    [container] = document_of("DaemonSet")["spec"]["template"]["spec"]["containers"]
    [port] = container["ports"]
    assert loaded.config.metrics.address == f":{port['containerPort']}"
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": port["name"]}


LONGEST_START_S: Final = 300.0
"""docs/performance.md has the start in an emulated machine; the rest is for a node that is short of memory."""


def test_a_slow_start_is_given_five_minutes_before_any_probe_could_end_it() -> None:
    """A kubelet starts the other probes when the startup probe has succeeded."""
    startup = container()["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= LONGEST_START_S
    assert "initialDelaySeconds" not in container()["livenessProbe"]


def test_the_configuration_is_valid_and_enforces(tmp_path: Path) -> None:
    from nodeagent.config import load
    from nodeagent.config.schema import Mode

    loaded = load.load(str(REPOSITORY / "systemd" / "config.yaml"))
    assert loaded.config.mode is Mode.ENFORCE
    assert not loaded.warnings


def test_what_the_configuration_shows_in_comments_is_valid_and_is_the_default(tmp_path: Path) -> None:
    from nodeagent.config import defaults, load

    text = document_of("ConfigMap")["data"]["config.yaml"]
    shown = re.sub(r"^# (?=[a-zA-Z]+:(?: \S+)?$|  )", "", text, flags=re.MULTILINE)
    assert yaml.safe_load(shown).keys() > {"evictionHard", "protection", "escalation", "conditions"}
    file = tmp_path / "config.yaml"
    file.write_text(shown, encoding="utf-8")
    loaded, plain = load.load(str(file)), load.load(str(REPOSITORY / "systemd" / "config.yaml"))
    assert loaded.config.protection == plain.config.protection
    assert loaded.config.escalation == plain.config.escalation
    assert loaded.config.conditions == plain.config.conditions
    hard = {t.signal: t.value for t in loaded.config.thresholds if t.hard and t.signal in defaults.EVICTION_HARD}
    assert hard == dict(defaults.EVICTION_HARD)
