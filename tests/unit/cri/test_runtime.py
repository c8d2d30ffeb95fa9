"""The images and containers of a runtime: answers of a real containerd 1.6, and the CRI's messages field by field."""

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pytest

from nodeagent.cri.grpc_client import GrpcClient, GrpcError
from nodeagent.cri.protobuf import encode, text
from nodeagent.cri.runtime import Container, Image, RuntimeClient, RuntimeFacts
from tests.support.cri_server import container_status, serving
from tests.support.paths import REPOSITORY

RECORDED: Final[dict[str, str]] = json.loads((REPOSITORY / "tests/data/containerd/answers.json").read_text())
IMAGES, RUNTIME = "/runtime.v1.ImageService", "/runtime.v1.RuntimeService"
USED: Final = Image("sha256:50", ("docker.io/library/used:1",), 10, pinned=False)
UNUSED: Final = Image("sha256:fe", ("docker.io/library/unused:1",), 20, pinned=False)


def sandbox(id_: str, state: int) -> bytes:
    metadata = encode(1, "web") + encode(2, "uid") + encode(3, "shop") + encode(4, 0)
    return encode(1, encode(1, id_) + encode(2, metadata) + encode(3, state))


def container(id_: str, state: int, *, image: str, ref: str) -> bytes:
    fields = [encode(1, id_), encode(2, "s1"), encode(3, encode(1, "main")), encode(4, encode(1, image))]
    return encode(1, b"".join(fields) + encode(5, ref) + encode(6, state) + encode(7, 1_800_000_000_000_000_000))


def recorded(answer: bytes) -> Callable[[bytes], bytes]:
    return lambda _request: answer


def facts_from(
    tmp_path: Path, sandboxes: bytes = b"", containers: bytes = b"", mounted: Sequence[str] = ()
) -> RuntimeFacts:
    answers: dict[str, Callable[[bytes], bytes]] = {
        f"{RUNTIME}/ListPodSandbox": lambda _: sandboxes,
        f"{RUNTIME}/ListContainers": lambda _: containers,
        f"{RUNTIME}/ContainerStatus": lambda request: container_status(text(request, 1), mounted=mounted),
    }
    for method, answer in RECORDED.items():
        answers[method] = recorded(base64.b64decode(answer))
    with serving(tmp_path / "s", dict(answers)) as server, GrpcClient(server.path) as grpc:
        return RuntimeClient(grpc).read_facts()


def test_the_images_of_a_real_containerd(tmp_path: Path) -> None:
    facts = facts_from(tmp_path)
    assert facts.sandbox_image == "registry.k8s.io/pause:3.6"
    assert {each.names: each.size for each in facts.images} == {
        ("registry.k8s.io/pause:3.6",): 1987186,
        ("docker.io/library/used:1",): 10384220,
        ("docker.io/library/unused:1",): 22969415,
    }
    # containerd 1.6 does not mark the image of sandboxes as pinned.
    assert not any(each.pinned for each in facts.images)
    assert [each.names for each in facts.unused()] == [("docker.io/library/unused:1",), ("docker.io/library/used:1",)]


def test_containers_have_their_pod_state_and_image(tmp_path: Path) -> None:
    containers = container("c1", 1, image="sha256:50", ref="sha256:50") + container("c2", 2, image="x", ref="sha256:fe")
    facts = facts_from(tmp_path, sandbox("s1", 0) + sandbox("s2", 1), containers)
    assert facts.containers == (
        Container("s1", "shop/web", live=True),
        Container("s2", "shop/web", live=False),
        Container("c1", "shop/web", live=True, image_ids=frozenset({"sha256:50"})),
        Container("c2", "shop/web", live=False, image_ids=frozenset({"x", "sha256:fe"})),
    )


def test_an_image_that_is_mounted_as_a_volume_is_in_use(tmp_path: Path) -> None:
    """By the ID that the kubelet gave the runtime for it."""
    pulled = {each.names[0]: each.id for each in facts_from(tmp_path).images}
    mounted = pulled["docker.io/library/unused:1"]
    containers = container("c1", 1, image="x", ref="x")
    (tmp_path / "s").unlink()
    facts = facts_from(tmp_path, sandbox("s1", 0), containers, [mounted, "sha256:another"])
    assert [each.names for each in facts.unused()] == [("docker.io/library/used:1",)]


@pytest.mark.parametrize("used_as", ["sha256:50", "50", "docker.io/library/used:1"])
@pytest.mark.parametrize("live", [True, False])
def test_an_image_is_in_use_by_each_of_its_names_also_by_an_ended_container(used_as: str, live: bool) -> None:
    user = Container("c1", "shop/web", live=live, image_ids=frozenset({used_as}))
    facts = RuntimeFacts((USED, UNUSED), (user,), "")
    assert facts.in_use(USED)
    assert facts.unused() == [UNUSED]


@pytest.mark.parametrize(
    "kept",
    [
        UNUSED._replace(pinned=True),
        UNUSED._replace(names=("registry.k8s.io/pause:3.9",)),
        UNUSED._replace(names=("docker.io/rancher/mirrored-pause@sha256:7c",)),
        UNUSED._replace(names=("own/sandbox:1",)),
    ],
)
def test_pinned_images_and_those_of_sandboxes_are_never_unused(kept: Image) -> None:
    assert RuntimeFacts((kept,), (), "own/sandbox:1").unused() == []


def test_an_image_that_only_sounds_like_it_is_no_sandbox() -> None:
    other = UNUSED._replace(names=("docker.io/library/pauses:1",))
    assert RuntimeFacts((other,), (), "").unused() == [other]


def test_unused_images_come_largest_first() -> None:
    assert RuntimeFacts((USED, UNUSED), (), "").unused() == [UNUSED, USED]


def test_an_image_is_removed_by_its_id(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "s", {f"{IMAGES}/RemoveImage": lambda _: b""}) as server,
        GrpcClient(server.path) as grpc,
    ):
        RuntimeClient(grpc).remove_image(UNUSED, timeout_s=5)
    assert server.calls == [(f"{IMAGES}/RemoveImage", encode(1, encode(1, "sha256:fe")))]


def test_a_malformed_answer_is_an_error(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "s", {f"{IMAGES}/ListImages": lambda _: b"\x0a\x7f"}) as server,
        GrpcClient(server.path) as grpc,
        pytest.raises(GrpcError, match="malformed"),
    ):
        RuntimeClient(grpc).read_facts()
