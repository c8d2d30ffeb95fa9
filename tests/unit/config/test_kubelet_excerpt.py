"""The excerpt of a kubelet's configuration: what concerns evictions, and nothing that could be a secret."""

import pytest
import yaml

from nodeagent.config import kubelet_excerpt
from tests.support.paths import DATA

FILE = """\
kind: KubeletConfiguration
evictionHard: {memory.available: 200Mi, nodefs.available: "10%"}
systemReserved: {memory: 1Gi}
enforceNodeAllocatable: [pods]
staticPodURLHeader: {Authorization: [s3cr3t]}
tlsPrivateKeyFile: /etc/s3cr3t.key
authentication: {x509: {clientCAFile: /etc/s3cr3t.crt}}
futureKey: s3cr3t
"""


def test_listed_keys_are_kept_and_all_others_left_out() -> None:
    found = kubelet_excerpt.excerpt([("/a", FILE), ("/b", "maxPods: 110")], [])
    assert found["files"] == [
        {
            "path": "/a",
            "settings": {
                "kind": "KubeletConfiguration",
                "evictionHard": {"memory.available": "200Mi", "nodefs.available": "10%"},
                "systemReserved": {"memory": "1Gi"},
                "enforceNodeAllocatable": ["pods"],
            },
        },
        {"path": "/b", "settings": {"maxPods": "110"}},
    ]
    assert "s3cr3t" not in repr(found)


def test_listed_flags_are_kept_in_both_forms_and_all_others_left_out() -> None:
    flags = [
        "--eviction-hard=memory.available<1Gi",
        "--max-pods",
        "30",
        "--kubeconfig",
        "/etc/s3cr3t",
        "--bootstrap=s3cr3t",
    ]
    flags += ["--fail-swap-on", "--system-reserved", "memory=1Gi"]
    assert kubelet_excerpt.excerpt([], flags)["flags"] == [
        "--eviction-hard=memory.available<1Gi",
        "--max-pods=30",
        "--fail-swap-on",
        "--system-reserved=memory=1Gi",
    ]


def test_an_answer_of_configz_is_read() -> None:
    found = kubelet_excerpt.excerpt([("configz", '{"kubeletconfig": {"maxPods": 110, "token": "s3cr3t"}}')], [])
    assert found["files"][0]["settings"] == {"maxPods": "110"}


@pytest.mark.parametrize("text", ["a: [", "\x00", "- a", "[" * 5000, "s3cr3t: : :"])
def test_bad_content_is_a_problem_without_its_text(text: str) -> None:
    found = kubelet_excerpt.excerpt([("/a", text)], [])
    assert found["problems"] or found["files"] == [{"path": "/a", "settings": {}}]
    assert "s3cr3t" not in repr(found)


@pytest.mark.parametrize("path", sorted((DATA / "kubelet").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_thresholds_of_every_distribution_are_kept(path: object) -> None:
    text = path.read_text()  # type: ignore[attr-defined]
    for document in yaml.safe_load_all(text):
        if isinstance(document, dict) and "evictionHard" in document:
            found = kubelet_excerpt.excerpt([("/a", yaml.safe_dump(document))], [])
            hard = {key: str(value) for key, value in document["evictionHard"].items()}
            assert found["files"][0]["settings"]["evictionHard"] == hard
