"""Names of pods and containers, as log directories give them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config.schema import SamplingConfig
from nodeagent.model import NodeSnapshot
from nodeagent.sampling.hostfs.host import open_host
from nodeagent.sampling.pods.pod_names import PodName, parse_log_directory, parse_log_link
from nodeagent.sampling.sampler import Sampler
from tests.support.trees import Node, TreePod, write_node


def _sample(root: str) -> NodeSnapshot:
    with Sampler(open_host(root), SamplingConfig(), node_name="n") as sampler:
        return sampler.sample()


def test_a_pod_without_a_log_directory_has_no_name_but_is_listed(tmp_path: Path) -> None:
    pod = TreePod("a/b", logs=False)
    view = _sample(write_node(tmp_path, Node(pods=(pod,)))).pods[0]
    assert (view.pod.namespace, view.pod.name, view.pod.key) == (None, None, f"uid/{pod.cgroup_uid}")


@pytest.mark.parametrize(
    ("directory", "expected"),
    [
        ("default_web_2fc932ce", ("2fc932ce", PodName("default", "web"))),
        ("kube-system_coredns-1.2.3_x", ("x", PodName("kube-system", "coredns-1.2.3"))),
        ("default_web", None),
        ("a_b_c_d", None),
        ("__", None),
        ("lost+found", None),
    ],
)
def test_a_log_directory_gives_namespace_name_and_uid(directory: str, expected: object) -> None:
    assert parse_log_directory(directory) == expected


@given(st.text())
def test_any_directory_name_is_parsed_without_an_exception(name: str) -> None:
    parse_log_directory(name)
    parse_log_link(name)
