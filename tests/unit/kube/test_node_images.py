"""Which images on the node no pod uses, by what real kubelets write."""

import json

import pytest

from nodeagent.kube.node_images import NodeImage, UnusedImages
from nodeagent.kube.node_watch import decode_node
from nodeagent.kube.pod_decoder import decode_pod
from tests.fake_kube import node_object, pod
from tests.support.paths import RECORDED_NODES

RECORDED = RECORDED_NODES / "cgroupv2-imagefs-pressure/api"


def test_images_that_no_pod_uses_are_known_by_their_names() -> None:
    """A recorded node: `hog` runs in pods that name it by tag, `pause` is of no pod in the API server."""
    images = decode_node((RECORDED / "node.json").read_bytes()).images
    assert images is not None
    assert {image.names[0]: image.size for image in images} == {
        "localhost/ballast:1": 210463410, "localhost/hog:1": 2745008, "localhost/pause:1": 696991,
    }  # fmt: skip
    listed = json.loads((RECORDED / "pods.json").read_bytes())["items"]
    pods = tuple([decode_pod(json.dumps(item).encode()) for item in listed])
    unused = UnusedImages()
    assert unused.sum(images, pods) == 210463410 + 696991
    assert unused.sum(images, ()) == 210463410 + 2745008 + 696991
    assert unused.sum(images, pods) == 210463410 + 696991


@pytest.mark.parametrize(
    ("image", "image_id"),
    [
        ("docker.io/library/redis:7", "docker.io/library/redis@sha256:" + "a" * 64),
        ("docker.io/library/redis:7", "sha256:" + "b" * 64),
        ("redis:7", "docker.io/library/redis@sha256:" + "a" * 64),
    ],
)
def test_an_image_is_used_by_its_tag_or_its_digest(image: str, image_id: str) -> None:
    names = ("docker.io/library/redis@sha256:" + "a" * 64, "docker.io/library/redis:7")
    body = pod("one")
    name = body["spec"]["containers"][0]["name"]
    body["status"]["containerStatuses"] = [{"name": name, "image": image, "imageID": image_id}]
    assert UnusedImages().sum((NodeImage(names, 100),), (decode_pod(json.dumps(body).encode()),)) == 0


def test_a_node_without_images_in_its_status_has_unknown_ones() -> None:
    entry = node_object("lab-node")
    entry["status"].pop("images", None)
    assert decode_node(json.dumps(entry).encode()).images is None
    entry["status"]["images"] = [{"names": None}, {"names": ["a"], "sizeBytes": -1}]
    assert decode_node(json.dumps(entry).encode()).images == (NodeImage((), 0), NodeImage(("a",), 0))
