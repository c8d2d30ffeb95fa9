"""Write what the chart and the kustomizations share with daemonset.yaml, examples/ and monitoring/:
`python -m tests.support.chart`.

Rights and policies of the chart are those manifests, word for word, with the namespace of the release.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

import yaml

from nodeagent.actuators.conditions import OWN_PREFIX
from nodeagent.config import jsonschema
from nodeagent.model import ConditionType
from tests.support.paths import REPOSITORY

CHART: Final = REPOSITORY / "charts" / "nodeagent"
LABELS: Final = "  labels:\n    app.kubernetes.io/name: nodeagent\n"
CHART_LABELS: Final = '  labels:\n    {{- include "nodeagent.labels" . | nindent 4 }}\n'
NAMESPACE: Final = "{{ .Release.Namespace }}"
LEASE_NAMESPACE: Final = '{{ include "nodeagent.leaseNamespace" . }}'
HEADER: Final = "{{{{/* Generated from {source} by `python -m tests.support.chart`. */}}}}\n"
POLICIES: Final = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
COPIES: Final = {
    "kustomize/base/daemonset.yaml": "daemonset.yaml",
    "kustomize/components/brake/patch.yaml": "examples/daemonset-brake.yaml",
    "kustomize/components/non-root/patch.yaml": "examples/daemonset-non-root.yaml",
    "kustomize/components/selinux/patch.yaml": "examples/daemonset-selinux.yaml",
    "kustomize/components/leases/leases.yaml": "examples/fleet-leases.yaml",
    "kustomize/components/replacements/replacements.yaml": "examples/replacements.yaml",
    "kustomize/components/node-fit/node-fit.yaml": "examples/node-fit.yaml",
    "kustomize/components/eviction-request/eviction-request.yaml": "examples/eviction-request.yaml",
    "kustomize/components/resize/resize.yaml": "examples/resize.yaml",
    "kustomize/components/kubernetes-1.35/rights.yaml": "examples/kubernetes-1.35.yaml",
    "kustomize/components/monitoring/podmonitor.yaml": "monitoring/podmonitor.yaml",
    "kustomize/components/monitoring/prometheusrule.yaml": "monitoring/prometheusrule.yaml",
    "charts/nodeagent/files/alerts.yaml": "monitoring/alerts.yaml",
}
"""kustomize and helm read no file outside of their directory."""


def files() -> dict[str, str]:
    """Every generated file, by its path in the repository."""
    read = {source: (REPOSITORY / source).read_text("utf-8") for source in {*COPIES.values()}}
    rbac, policies = [], []
    for text in _documents(read["daemonset.yaml"]):
        kind = _kind(text)
        if kind in POLICIES:
            policies.append(_template(text))
        elif kind not in ("Namespace", "ConfigMap", "DaemonSet"):
            rbac.append(_with_options(_template(text), kind))
    templates = {
        "rbac": "---\n".join(rbac),
        "policies": _if(".Values.admissionPolicies", "---\n".join(policies)),
        "direct-rights": _if(
            'include "nodeagent.directRights" .',
            "---\n".join(_template(text) for text in _documents(read["examples/kubernetes-1.35.yaml"])),
        ),
        "leases": _if(
            _values_of("fleet maxConcurrentEvictions"),
            "---\n".join(_lease_rights(text) for text in _documents(read["examples/fleet-leases.yaml"])),
        ),
        "replacements": _if(
            _values_of("protection replacementWait"),
            "---\n".join(_template(text) for text in _documents(read["examples/replacements.yaml"])),
        ),
        "node-fit": _if(
            _values_of("protection nodeFit"),
            "---\n".join(_template(text) for text in _documents(read["examples/node-fit.yaml"])),
        ),
        "eviction-request": _if(
            _values_of("evictionRequest enabled"),
            "---\n".join(_with_policies(text) for text in _documents(read["examples/eviction-request.yaml"])),
        ),
        "resize": _if(
            _values_of("ownLimit resize enabled"),
            "---\n".join(_with_policies(text) for text in _documents(read["examples/resize.yaml"])),
        ),
    }
    sources = {
        "direct-rights": "examples/kubernetes-1.35.yaml",
        "leases": "examples/fleet-leases.yaml",
        "replacements": "examples/replacements.yaml",
        "node-fit": "examples/node-fit.yaml",
        "eviction-request": "examples/eviction-request.yaml",
        "resize": "examples/resize.yaml",
    }
    return {
        **{copy: read[source] for copy, source in COPIES.items()},
        **{
            f"charts/nodeagent/templates/{name}.yaml": HEADER.format(source=sources.get(name, "daemonset.yaml")) + text
            for name, text in templates.items()
        },
        "charts/nodeagent/values.schema.json": json.dumps(schema(), indent=1) + "\n",
        "charts/nodeagent/README.md": readme(),
    }


def _documents(manifest: str) -> Iterator[str]:
    """Each document without the comment above its first key."""
    for text in re.split(r"^---\n", manifest, flags=re.MULTILINE):
        yield text[text.index("apiVersion:") :]


def _kind(text: str) -> str:
    return str(yaml.safe_load(text)["kind"])


def _template(text: str) -> str:
    assert "{{" not in text
    text = text.replace(LABELS, CHART_LABELS).replace("namespace: nodeagent\n", f"namespace: {NAMESPACE}\n")
    return text.replace("system:serviceaccount:nodeagent:", f"system:serviceaccount:{NAMESPACE}:")


def _if(condition: str, text: str) -> str:
    return f"{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n"


def _values_of(path: str) -> str:
    """The values of this key, of which profiles may have their own."""
    keys = " ".join(f'"{key}"' for key in path.split())
    return f'include "nodeagent.valuesOf" (dict "config" .Values.config "path" (list {keys}))'


def _lease_rights(text: str) -> str:
    return _with_policies(text).replace(f"  namespace: {NAMESPACE}\n", f"  namespace: {LEASE_NAMESPACE}\n")


def _with_policies(text: str) -> str:
    text = _template(text)
    return _if(".Values.admissionPolicies", text) if any(f"kind: {kind}\n" in text for kind in POLICIES) else text


def _with_options(text: str, kind: str) -> str:
    """The ServiceAccount's annotations; the rights that are comments in daemonset.yaml."""
    if kind == "ServiceAccount":
        annotations = "annotations:\n    {{- toYaml . | nindent 4 }}\n"
        options = f"  {{{{- with .Values.serviceAccount.annotations }}}}\n  {annotations}  {{{{- end }}}}\n"
        return text.replace(CHART_LABELS, CHART_LABELS + options)
    commented = re.compile(r"(?:^  # (?:- apiGroups|  (?:resources|verbs)).*\n)+", re.MULTILINE)

    def uncomment(match: re.Match[str]) -> str:
        rules = re.sub(r"^  # ", "  ", match[0], flags=re.MULTILINE)
        if "pods/status" not in rules:
            return match[0]
        return (
            _if(f'contains "delete" ({_values_of("escalation onBlocked")})', rules)
            .replace("{{- if", "  {{- if")
            .replace("{{- end", "  {{- end")
        )

    return commented.sub(uncomment, text) if kind == "ClusterRole" else text


# --- values ----------------------------------------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    """values.schema.json: unknown values are errors, also in `config`, which has the configuration's own schema."""
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    own = json.loads(jsonschema.text().replace('"#/$defs/', '"#/definitions/'))
    for key in ("apiVersion", "kind"):
        own["properties"].pop(key)
    properties = {name: _schema_of(value) for name, value in values.items()}
    for name in ("resources", "nodeSelector", "affinity", "podAnnotations", "podLabels", "updateStrategy"):
        properties[name] = {"type": "object"}
    properties |= {
        "config": {key: own[key] for key in ("type", "additionalProperties", "properties")},
        "mode": {"enum": ["", "dry-run", "enforce"]},
        "distribution": {"enum": ["kubeadm", "k3s", "rke2", "talos", "openshift", "eks", "gke", "aks"]},
        "directRights": {"enum": ["auto", True, False]},
        "priorityClassQuota": {"enum": ["auto", True, False]},
    }
    properties["image"]["properties"]["digest"] = {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"}
    properties["hostPaths"]["properties"]["kubeletConfig"] = {"type": ["array", "null"], "items": {"type": "string"}}
    for part in ("serviceAccount", "monitoring"):
        for key, value in values[part].items():
            if value == {}:
                properties[part]["properties"][key] = {"type": "object"}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart nodeagent",
        "type": "object",
        "additionalProperties": False,
        "properties": {**properties, "global": {"type": "object"}},
        "definitions": own["$defs"],
    }


def _schema_of(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        properties = {name: _schema_of(each) for name, each in value.items()}
        return {"type": "object", "additionalProperties": False, "properties": properties}
    kinds = {bool: "boolean", str: "string", int: "integer", list: "array"}
    return {"type": kinds[type(value)]} if value is not None else {}


_WHOLE: Final = ("config", "resources", "nodeSelector", "tolerations", "updateStrategy")
"""Values that are replaced as they are, described in one row."""


def readme() -> str:
    """The chart's README with a table of the values, from the comments of values.yaml."""
    rows = [f"| `{name}` | `{default}` | {text} |" for name, default, text in _rows()]
    return README.format(table="\n".join(rows), patch=json.dumps(_PATCH))


def _rows() -> Iterator[tuple[str, str, str]]:
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    comment: list[str] = []
    trail: list[str] = []
    for line in (CHART / "values.yaml").read_text("utf-8").splitlines():
        if match := re.match(r"^ *# (.+)$", line):
            comment.append(match[1])
            continue
        match = re.match(r"^(?P<indent> *)(?P<key>\w+):(?: [^#]*)?(?:# (?P<text>.+))?$", line)
        if match is None:
            continue
        depth = len(match["indent"]) // 2
        trail[depth:] = [match["key"]]
        text = " ".join([*comment, *([match["text"]] if match["text"] else [])])
        comment = []
        value: Any = values
        for key in trail:
            value = value[key] if isinstance(value, dict) else None
        if trail[0] in _WHOLE and len(trail) > 1:
            continue
        if text or not isinstance(value, dict) or not value:
            yield ".".join(trail), _default(value), text


def _default(value: Any) -> str:
    if isinstance(value, dict | list) and value:
        return "see values.yaml"
    return json.dumps(value)


README: Final = """# Helm chart of nodeagent

<!-- Generated by `python -m tests.support.chart`; edit values.yaml or tests/support/chart.py instead. -->

```
kubectl create namespace nodeagent
kubectl label namespace nodeagent pod-security.kubernetes.io/enforce=privileged
helm install nodeagent charts/nodeagent --namespace nodeagent \\
  --set image.repository=REGISTRY/nodeagent --set mode=dry-run
```

With its defaults the chart renders the objects of [daemonset.yaml](../../daemonset.yaml), except the Namespace. `mode`
dry-run decides and logs, and changes nothing; `--set mode=enforce` later. An error in `config` fails `helm install`.

With `distribution=openshift` a RoleBinding lets the agent's pods use the SecurityContextConstraints `privileged`:
`restricted-v2` allows no host path; and SELinux runs them as `spc_t`. The chart was not tried on OpenShift.

| value | default | meaning |
| --- | --- | --- |
{table}

## Remove it

The pods end first, while they may still remove their conditions and taints; `helm uninstall` alone takes their rights
away before that, also with `--cascade` and `--wait`.

```
kubectl -n nodeagent delete daemonset nodeagent --cascade=foreground
helm uninstall nodeagent --namespace nodeagent
```

What was left on a Node (the kubelet resets the conditions that are its own):

```
kubectl taint node NODE nodeagent.io/memory-pressure:NoSchedule-    # and disk-pressure, pid-pressure
kubectl patch node NODE --subresource=status --patch '{patch}'
```
"""

_PATCH: Final = {"status": {"conditions": [{"type": OWN_PREFIX + each, "$patch": "delete"} for each in ConditionType]}}


if __name__ == "__main__":
    for name, text in files().items():
        (REPOSITORY / name).write_text(text, "utf-8")
