"""Where a command takes the labels of the node from, and what it says about them."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodeagent.commands import arguments_common, node_labels
from nodeagent.config import load
from nodeagent.config.load import LoadedConfig
from nodeagent.loop.node_profiles import SavedLabels
from nodeagent.loop.state_store import AgentState
from nodeagent.policy import state as policy_states
from nodeagent.records.state_file import StateFile
from nodeagent.sampling.hostfs.host import open_host
from tests.fake_kube import ApiServer
from tests.support import config_files

BODY = """
    mode: enforce
    stateDir: {state}
    cluster: {{kubeconfig: {kubeconfig}}}
    profiles: [{{name: gpu, nodeSelector: {{pool: gpu}}, mode: dry-run}}]
"""
UNKNOWN = "the labels of the node are not known, so no profile applies and nothing is enforced"


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(node="lab-node", pods=[]) as server:
        server.patch_node({"metadata": {"labels": {"pool": "gpu"}}})
        yield server


@pytest.fixture
def loaded(tmp_path: Path, api: ApiServer) -> LoadedConfig:
    kubeconfig = api.kubeconfig(tmp_path / "kubeconfig")
    return config_files.read(BODY.format(state=tmp_path / "state", kubeconfig=kubeconfig))


def found(loaded: LoadedConfig, *, node: str = "lab-node", **options: object) -> tuple[tuple[str, ...] | None, str]:
    given = {"given": None, **options}
    applied, [note] = node_labels.apply(loaded, open_host("/"), node_name=node, **given)  # type: ignore[arg-type]
    return applied.active, note.message


def save(loaded: LoadedConfig, node: str) -> None:
    Path(loaded.config.state_dir).mkdir()
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    store = StateFile(Path(loaded.config.state_dir) / "state", shape=AgentState, boot_id=boot_id)
    labels = SavedLabels(node, {"pool": "gpu"})
    store.save(AgentState(policy_states.initial("a", now=1.0), node_labels=labels))
    store.close()


def test_given_labels_count_before_those_of_the_api_server(loaded: LoadedConfig, api: ApiServer) -> None:
    assert found(loaded, given={}) == ((), "none of gpu matches this node (by --node-labels)")
    assert api.requests == []


def test_the_api_server_is_asked_for_the_node_alone(loaded: LoadedConfig, api: ApiServer) -> None:
    assert found(loaded) == (("gpu",), "gpu (by the labels of node lab-node)")
    assert len(api.sent("GET", "/nodes/lab-node")) == 1
    assert api.sent("GET", "/pods") == []


def test_without_an_answer_the_labels_that_the_agent_saw_last_count(loaded: LoadedConfig, api: ApiServer) -> None:
    save(loaded, "lab-node")
    api.go_down()
    active, text = found(loaded)
    assert active == ("gpu",)
    assert text.startswith("gpu (by the labels that the agent saw last; the labels of node lab-node could not be read")
    never = "gpu (by the labels that the agent saw last; the API server was not asked)"
    assert found(loaded, api="never") == (("gpu",), never)


@pytest.mark.parametrize("saved", [None, "other-node"])
def test_without_labels_of_this_node_they_are_unknown(loaded: LoadedConfig, api: ApiServer, saved: str | None) -> None:
    if saved is not None:
        save(loaded, saved)
    api.go_down()
    active, text = found(loaded)
    assert active is None
    assert text.startswith(f"{UNKNOWN} (the labels of node lab-node could not be read: ")


def test_a_configuration_without_profiles_reads_nothing(api: ApiServer) -> None:
    plain = load.defaults()
    assert node_labels.apply(plain, open_host("/"), node_name="lab-node", given=None) == (plain, ())
    assert api.requests == []


def test_labels_are_written_as_kubectl_writes_them() -> None:
    assert arguments_common.node_labels("pool=gpu,example.com/a=b=c,empty=") == {
        "pool": "gpu",
        "example.com/a": "b=c",
        "empty": "",
    }
    assert arguments_common.node_labels("") == {}
    for wrong in ("pool", "=gpu"):
        with pytest.raises(argparse.ArgumentTypeError):
            arguments_common.node_labels(wrong)
