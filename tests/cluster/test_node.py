"""The own Node as last seen, whoever saw it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Raw

from nodeagent.cluster.credentials import find_credentials
from nodeagent.cluster.node import NodeWatch, older
from nodeagent.cluster.transport import connect
from tests.apiserver import ApiServer, node_object


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[NodeWatch]:
    """Not started: the tests say what it hears."""
    with ApiServer() as api:
        transport = connect(find_credentials(str(api.kubeconfig(tmp_path / "kubeconfig"))))
        yield NodeWatch(transport, "lab-node")


def node(version: int, memory: str) -> bytes:
    entry = node_object("lab-node")
    entry["metadata"]["resourceVersion"] = str(version)
    entry["status"]["conditions"][0]["status"] = memory
    return json.dumps(entry).encode()


def seen(watch: NodeWatch) -> str:
    view = watch.view()
    assert view is not None
    return view.conditions["MemoryPressure"].status


def test_what_the_watch_brings_late_does_not_undo_what_a_write_was_answered_with(watch: NodeWatch) -> None:
    watch.replace([Raw(node(9, "False"))])
    watch.learn(node(12, "True"))
    watch.apply("MODIFIED", Raw(node(11, "False")))
    assert seen(watch) == "True"
    watch.apply("MODIFIED", Raw(node(13, "False")))
    assert seen(watch) == "False"


def test_a_new_list_is_believed_even_if_its_versions_are_smaller(watch: NodeWatch) -> None:
    watch.learn(node(100, "True"))
    watch.replace([Raw(node(5, "False"))])
    assert seen(watch) == "False"


def test_versions_are_compared_as_numbers_where_they_are_numbers() -> None:
    assert older("9", "10")
    assert not older("10", "9")
    assert not older("a", "b")


def test_a_node_that_cannot_be_read_keeps_the_last_view_and_says_so(watch: NodeWatch) -> None:
    watch.replace([Raw(node(5, "False"))])
    watch.apply("MODIFIED", Raw(b'{"metadata": 3}'))
    assert seen(watch) == "False"
    watch.apply("DELETED", Raw(node(6, "False")))
    assert watch.view() is None


def test_no_node_is_not_an_empty_node(watch: NodeWatch) -> None:
    watch.replace([])
    assert watch.view() is None
