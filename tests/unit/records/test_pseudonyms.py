"""Pseudonyms: no name survives, the same name stays the same, and what is no name stays as it is."""

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config import load
from nodeagent.model import RecordedSample, Refusal, RefusalCode
from nodeagent.policy import engine
from nodeagent.records.flight_recorder import FlightRecorder, Packer, read_records
from nodeagent.records.pseudonyms import STANDARD_NAMES, Pseudonyms
from tests.support import named_node, nodes


@pytest.fixture(scope="module")
def names() -> Pseudonyms:
    """That have read everything."""
    made = Pseudonyms(key=b"k" * 32).learn()
    made.header(named_node.header())
    made.sample(named_node.sample())
    return made.replace()


def packed(value: object) -> bytes:
    return msgspec.json.encode(value)


def records(tmp_path: Any) -> list[dict[str, Any]]:
    plan, inputs, _ = named_node.decision()
    assert plan.victims, "the node evicts the pod"
    assert FlightRecorder(tmp_path).decision(plan, wall_time=nodes.WALL, inputs=inputs) == ""
    return list(read_records(tmp_path))


def test_the_node_of_these_tests_has_every_name(tmp_path: Any) -> None:
    everything = packed((named_node.header(), named_node.sample(), records(tmp_path)))
    assert set(named_node.leaks(everything)) == set(named_node.NAMES)


def test_no_name_is_left_in_a_sample_or_a_header(names: Pseudonyms) -> None:
    sample = names.sample(named_node.sample())
    assert named_node.leaks(packed(sample)) == []
    assert named_node.leaks(packed(names.header(named_node.header()))) == []


def test_no_name_is_left_in_a_decision_and_its_inputs(names: Pseudonyms, tmp_path: Any) -> None:
    (record,) = records(tmp_path)
    rewritten = names.record(record)
    assert named_node.leaks(packed(rewritten)) == []
    inputs = Packer().unpack(rewritten["inputs"]).inputs
    assert inputs is not None
    assert named_node.leaks(packed(inputs)) == []


def test_the_same_name_is_the_same_everywhere(names: Pseudonyms, tmp_path: Any) -> None:
    sample = names.sample(named_node.sample())
    (record,) = records(tmp_path)
    rewritten = names.record(record)
    pod = sample.snapshot.pods[0].pod
    usage = sample.snapshot.pods[0].usage
    assert usage is not None
    victim = rewritten["victims"][0]
    assert pod.name is not None
    assert re.fullmatch(r"pod-[0-9a-f]{8}", pod.name)
    assert (victim["namespace"], victim["name"], victim["uid"]) == (pod.namespace, pod.name, pod.uid)
    assert victim["owner"] == f"ReplicaSet/{pod.owner.name if pod.owner else ''}"
    assert usage.cgroup == f"/kubepods.slice/kubepods-pod{pod.uid.replace('-', '_')}.slice"
    assert usage.containers[0].container_id == pod.containers[0].container_id
    assert pod.containers[0].name in victim["message"]
    assert sample.snapshot.notes[0].message == f"{pod.namespace}/{pod.name} cannot be read"
    assert sample.snapshot.notes[0].about == f"{pod.namespace}/{pod.name}"


def test_numbers_states_and_ids_of_decisions_stay(names: Pseudonyms) -> None:
    before, after = named_node.sample(), names.sample(named_node.sample())
    assert (after.plan_id, after.exact) == (before.plan_id, before.exact)
    assert after.signals == before.signals
    assert after.conditions == before.conditions
    assert after.snapshot.observations == before.snapshot.observations
    assert [view.usage and view.usage.memory_working_set for view in after.snapshot.pods] == [4 * nodes.GI, nodes.MI]
    assert after.snapshot.pods[1].pod.namespace == "kube-system"
    assert after.snapshot.pods[0].pod.annotations["nodeagent.io/eviction"] == "last"


def test_the_policy_decides_the_same(names: Pseudonyms, tmp_path: Any) -> None:
    (record,) = records(tmp_path)
    inputs = Packer().unpack(names.record(record)["inputs"]).inputs
    _, original, _ = named_node.decision()
    assert inputs is not None
    plans = [
        engine.decide(each.snapshot, each.state, now=each.now, config=named_node.config())[0]
        for each in (original, inputs)
    ]
    assert [plan.deficit for plan in plans] == [plans[0].deficit] * 2
    assert [[each.code for each in plan.refusals] for plan in plans] == [[each.code for each in plans[0].refusals]] * 2


def test_a_configuration_stays_valid_and_names_the_pseudonyms(names: Pseudonyms) -> None:
    text = names.header(named_node.header()).configuration
    sample = names.sample(named_node.sample())
    loaded = load.loads(text)
    pod = sample.snapshot.pods[0].pod
    assert loaded.config.protection.namespaces == ("kube-system", pod.namespace)
    assert loaded.config.thresholds[0].value == nodes.config(nodes.hard()).thresholds[0].value._replace(text="1Gi")
    (key,) = [key for key in pod.annotations if key != "nodeagent.io/eviction"]
    assert loaded.config.protection.annotations == (f"{key}={pod.annotations[key]}",)


def test_two_files_have_different_pseudonyms() -> None:
    one, other = Pseudonyms(), Pseudonyms()
    assert one.name("pod", "checkout") != other.name("pod", "checkout")
    assert one.name("pod", "checkout") == one.name("pod", "checkout")


def test_inputs_of_another_version_are_dropped(names: Pseudonyms) -> None:
    record = {"record": "decision", "id": "a-1", "inputs": {"shape": "other", "data": "checkout-7d9f8b6c5d-x2x4z"}}
    assert "inputs" not in names.record(record)


@pytest.mark.parametrize(
    "text",
    [
        "memory.available < 1Gi for 1m30s, 212Mi available",
        "owner back-off: 2 evictions in a row, next in 120s",
        "rate limit of node reached: burst 5, 30 per hour",
        "/proc/meminfo - /sys/fs/cgroup/memory.stat",
        "read 2026-11-24T19:00:00Z, 12.5% of 16Gi",
        "No such file or directory",
        "evictionSoftGracePeriod: {memory.available: 1m30s}",
        "metrics: {address: '[::1]:9808'}, or [::]:9808",
        "not in UTF-8; 00:00:00.5 and 23:59:59",
        "requireStall: {kind: full, window: avg10}",
    ],
)
def test_a_text_without_names_stays(names: Pseudonyms, text: str) -> None:
    assert names.text(text) == text


@pytest.mark.parametrize(
    "word", ["zanzibar", "zanzibar-5d4f", "Zanzibar.Internal", "zan_zibar", "Zürich", "日本", "x9y8z7"]
)
def test_a_word_that_no_message_has_is_replaced(names: Pseudonyms, word: str) -> None:
    assert word not in names.text(f"the API server answered {word}: {word}")


HOLDERS = (
    "ip-10-0-3-18.eu-central-1.compute.internal",
    "worker-3",
    "node-2",
    "gke-prod-pool-1-3f2a",
    "10-0-3-18",
    "10.0.3.18",
    "2001:470:26:307::1",
)
"""Names that nodes have, of which a word or a number may be nodeagent's own."""


@pytest.mark.parametrize("holder", HOLDERS)
def test_another_node_that_holds_an_eviction_slot_is_not_named(names: Pseudonyms, holder: str) -> None:
    text = f"all 2 slots of the zone are taken, by {holder}, master-0"
    block = Refusal(RefusalCode.WAITS_FOR_LEASE, text)
    sample = names.sample(RecordedSample(nodes.snapshot()._replace(soft_tier_blocked_by=block)))
    message = names.text(text)
    assert sample.snapshot.soft_tier_blocked_by == block._replace(message=message)
    assert re.fullmatch(
        "all 2 slots of the zone are taken, by (name|address)-[0-9a-f]{8}, name-[0-9a-f]{8}", message
    ), message


@pytest.mark.parametrize(
    ("address", "before", "after"),
    [
        ("2001:470:26:307::1", "Get https://[", "]:6443: connection refused"),
        ("2001:0db8:85a3:0000:0000:8a2e:0370:7334", "dial tcp ", ": i/o timeout"),
        ("FE80::1", "lookup on ", "."),
        ("fd00::", "route ", "/64"),
        ("::ffff:10.1.2.3", "", ""),
    ],
)
def test_an_address_of_ipv6_is_replaced(names: Pseudonyms, address: str, before: str, after: str) -> None:
    around = [re.escape(names.text(each)) for each in (before, after)]
    assert re.fullmatch(f"{around[0]}address-[0-9a-f]{{8}}{around[1]}", names.text(f"{before}{address}{after}"))


def test_a_node_that_is_named_by_its_address_is_the_same_in_a_text() -> None:
    names = Pseudonyms(key=b"k").learn()
    nodes_of = {each: names.name("node", each) for each in ("10.0.3.18", "fd00::12", "ip-10-0-3-18.ec2.internal")}
    names.replace()
    for node, pseudonym in nodes_of.items():
        assert names.text(f"all slots are taken, by {node}") == f"all slots are taken, by {pseudonym}"


@pytest.mark.parametrize("name", sorted(STANDARD_NAMES))
def test_names_that_every_cluster_has_stay(name: str) -> None:
    assert Pseudonyms().name("namespace", name) == name


NAME = st.from_regex(r"[a-z]{3,8}[0-9][a-z0-9]{1,6}(-[a-z0-9]{1,8}){0,3}", fullmatch=True)


@given(
    name=NAME,
    before=st.sampled_from(["", "pod ", "a/", "(", '"', "x=", "café "]),
    after=st.sampled_from(["", ":", "/b", ".", ")", "\n"]),
)
def test_a_known_name_is_found_wherever_it_stands(name: str, before: str, after: str) -> None:
    names = Pseudonyms(key=b"k").learn()
    pseudonym = names.name("pod", name)
    assert pseudonym in names.replace().text(f"{before}{name}{after}")
    assert name not in names.text(f"{before}{name}{after}")


@given(text=st.text(max_size=200))
def test_any_text_is_rewritten_without_an_error(text: str) -> None:
    names = Pseudonyms(key=b"k")
    assert names.text(text) == names.text(text)


def test_every_field_of_a_sample_can_be_rewritten() -> None:
    """A new field of a new type fails here: it is rewritten, or listed as one without text."""
    Pseudonyms()
    assert isinstance(Pseudonyms().sample(RecordedSample(nodes.snapshot())), RecordedSample)
