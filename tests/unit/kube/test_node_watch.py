"""The newest version of the own Node, from the watch or from a write."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Raw

from nodeagent.kube.credentials import find_credentials
from nodeagent.kube.node_watch import NodeWatch, decode_node, is_older
from nodeagent.kube.transport import connect
from tests.fake_kube import Answer, ApiServer, Request, node_object


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[NodeWatch]:
    """Not started: the tests deliver its events."""
    with ApiServer() as api:
        transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))
        yield NodeWatch(transport, "lab-node")


def node(version: int, memory: str) -> bytes:
    entry = node_object("lab-node")
    entry["metadata"]["resourceVersion"] = str(version)
    entry["status"]["conditions"][0]["status"] = memory
    return json.dumps(entry).encode()


def status_of(watch: NodeWatch) -> str:
    view = watch.view()
    assert view is not None
    return view.conditions["MemoryPressure"].status


def test_a_late_event_of_the_watch_does_not_undo_the_answer_to_a_write(watch: NodeWatch) -> None:
    watch.replace([Raw(node(9, "False"))])
    watch.update(node(12, "True"))
    watch.apply("MODIFIED", Raw(node(11, "False")))
    assert status_of(watch) == "True"
    watch.apply("MODIFIED", Raw(node(13, "False")))
    assert status_of(watch) == "False"


def test_a_new_list_counts_even_if_its_versions_are_smaller(watch: NodeWatch) -> None:
    watch.update(node(100, "True"))
    watch.replace([Raw(node(5, "False"))])
    assert status_of(watch) == "False"


def test_resource_versions_are_compared_as_numbers_if_they_are_numbers() -> None:
    assert is_older("9", "10")
    assert not is_older("10", "9")
    assert not is_older("a", "b")
    assert not is_older("\u00b2", "\u00b3"), "digits that int() does not read"
    assert not is_older("1", "9" * 5000), "more digits than int() reads"


@pytest.mark.parametrize(
    ("annotation", "arguments"),
    [
        # As k3s writes it: encoding/json of Go escapes the angle bracket.
        (r'["server","--kubelet-arg","eviction-hard=memory.available\u003c1Gi"]', 3),
        ("[]", 0),
        ("", 0),
        ("not JSON", 0),
        ('{"a": 1}', 0),
        ("[1]", 0),
        ("[" * 5000, 0),
        (json.dumps(["server", "--kubelet-arg", "eviction-hard=" + "a," * 20_000]), 0),
    ],
)
def test_the_arguments_of_k3s_are_in_an_annotation_and_a_bad_one_hides_no_node(annotation: str, arguments: int) -> None:
    entry = node_object("lab-node")
    entry["metadata"]["annotations"] = {"k3s.io/node-args": annotation}
    view = decode_node(json.dumps(entry).encode())
    assert view.name == "lab-node"
    assert len(view.k3s_arguments) == arguments
    assert view.k3s_arguments[2:] in ((), ("eviction-hard=memory.available<1Gi",))


def test_an_unreadable_node_keeps_the_last_view_and_sets_the_reason(watch: NodeWatch) -> None:
    watch.replace([Raw(node(5, "False"))])
    watch.apply("MODIFIED", Raw(b'{"metadata": 3}'))
    assert status_of(watch) == "False"
    watch.apply("DELETED", Raw(node(6, "False")))
    assert watch.view() is None


def test_no_node_is_not_an_empty_node(watch: NodeWatch) -> None:
    watch.replace([])
    assert watch.view() is None


def lists(api: ApiServer) -> int:
    return sum(request.path == "/api/v1/nodes" and "watch" not in request.query for request in api.requests)


def test_one_empty_list_does_not_hide_the_node_until_its_next_change(tmp_path: Path) -> None:
    with ApiServer() as api:
        meta = {"resourceVersion": str(api.store.version)}
        empty = {"kind": "NodeList", "apiVersion": "v1", "metadata": meta, "items": []}

        def instead(request: Request) -> Answer | None:
            wrong = request.path == "/api/v1/nodes" and "watch" not in request.query and lists(api) == 0
            return Answer(200, empty) if wrong else None

        api.instead = instead
        watch = NodeWatch(connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig")))), "lab-node")
        watch.start()
        try:
            assert api.wait_for(lambda: lists(api) == 1)
            assert api.wait_for(lambda: watch.view() is not None, 10)
            assert api.wait_for(lambda: lists(api) == 2)
        finally:
            watch.stop()


def test_a_missing_node_is_listed_less_and_less_often_and_found_at_once(tmp_path: Path) -> None:
    with ApiServer(node="another") as api:
        watch = NodeWatch(connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig")))), "lab-node")
        watch.start()
        try:
            assert api.wait_for(lambda: lists(api) >= 2)
            assert not api.wait_for(lambda: lists(api) > 4, 5)
            assert api.wait_for(lambda: api.watched("/api/v1/nodes"))
            api.add_node(node_object("lab-node"))
            assert api.wait_for(lambda: watch.view() is not None, 1)
        finally:
            watch.stop()
