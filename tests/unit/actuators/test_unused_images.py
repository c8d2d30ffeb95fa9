"""Unused images are removed through the runtime's socket, and no other."""

import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import pytest

from nodeagent.actuators import reclaim_runner, unused_images
from nodeagent.actuators.reclaim_runner import JobResult
from nodeagent.actuators.unused_images import RemovedImages
from nodeagent.config.schema import ReclaimAction, ReclaimKind
from nodeagent.cri.grpc_client import GrpcError
from nodeagent.cri.protobuf import encode, messages, text
from nodeagent.model import ReclaimOrder, ReclaimResult, Signal, Tier
from tests.support import cri_server
from tests.support.cri_server import Answer, CriServer, Failure, serving

IMAGES, RUNTIME = "/runtime.v1.ImageService", "/runtime.v1.RuntimeService"
SOON: Final = 0.2


class Runtime:
    """A container runtime whose lists follow its removals."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.images = {"sha256:pause": ("registry.k8s.io/pause:3.9", 1), "sha256:used": ("shop/web:1", 50)}
        self.images |= {"sha256:old": ("shop/web:0", 40), "sha256:tool": ("tools/dump:2", 70)}
        self.used = ["sha256:used"]
        self.mounted: list[str] = []
        self.refuses: dict[str, Failure] = {}

    def serving(self) -> AbstractContextManager[CriServer]:
        answers: dict[str, Answer] = {
            f"{IMAGES}/ListImages": lambda _: b"".join(
                encode(1, encode(1, id_) + encode(2, name) + encode(4, size))
                for id_, (name, size) in self.images.items()
            ),
            f"{IMAGES}/RemoveImage": self.remove,
            f"{RUNTIME}/ListPodSandbox": lambda _: b"",
            f"{RUNTIME}/ListContainers": lambda _: b"".join(
                encode(1, encode(1, f"c-{id_}") + encode(5, id_) + encode(6, 2)) for id_ in self.used
            ),
            f"{RUNTIME}/ContainerStatus": self.container_status,
            f"{RUNTIME}/Status": lambda _: b"",
        }
        return serving(self.path, answers)

    def container_status(self, request: bytes) -> "bytes | Failure":
        id_ = text(request, 1)
        mounted = self.mounted if id_ == "c-sha256:used" else ()
        return self.refuses.get(id_, cri_server.container_status(id_, state=2, mounted=mounted))

    def remove(self, request: bytes) -> "bytes | Failure":
        [spec] = messages(request, 1)
        id_ = text(spec, 1)
        if id_ not in self.refuses:
            del self.images[id_]
        return self.refuses.get(id_, b"")


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    return Runtime(tmp_path / "cri.sock")


def remove(runtime: Runtime, *, within_s: float = 20.0, starting_s: float = SOON) -> RemovedImages:
    return unused_images.remove_unused_images(
        str(runtime.path), until=time.monotonic() + within_s, starting_s=starting_s
    )


def test_unused_images_go_and_those_in_use_and_of_sandboxes_stay(runtime: Runtime) -> None:
    with runtime.serving():
        assert remove(runtime) == RemovedImages(2, 110, 0)
    assert set(runtime.images) == {"sha256:pause", "sha256:used"}


def test_an_image_that_a_pod_mounts_as_a_volume_stays(runtime: Runtime) -> None:
    runtime.mounted = ["sha256:tool"]
    with runtime.serving() as server:
        assert remove(runtime) == RemovedImages(1, 40, 0)
    assert set(runtime.images) == {"sha256:pause", "sha256:used", "sha256:tool"}
    asked = [request for method, request in server.calls if method == f"{RUNTIME}/ContainerStatus"]
    assert asked == [encode(1, "c-sha256:used")], "once for all reads"


def test_nothing_is_removed_if_the_mounts_of_a_container_are_unknown(runtime: Runtime) -> None:
    runtime.refuses["c-sha256:used"] = Failure(2, "failed to get image")
    with runtime.serving(), pytest.raises(GrpcError, match="failed to get image"):
        remove(runtime)
    assert len(runtime.images) == 4


def test_a_container_that_is_removed_meanwhile_mounts_nothing(runtime: Runtime) -> None:
    runtime.refuses["c-sha256:used"] = Failure(5, "an error occurred when try to find container: not found")
    with runtime.serving():
        assert remove(runtime) == RemovedImages(2, 110, 0)


def test_the_deadline_holds_however_many_containers_are_read(runtime: Runtime) -> None:
    runtime.used = [f"sha256:{number}" for number in range(100)]
    with runtime.serving() as server:
        server.delay_s = 0.1
        began = time.monotonic()
        with pytest.raises(GrpcError):
            remove(runtime, within_s=1.0)
        assert time.monotonic() - began < 5


def test_an_image_of_a_pod_that_is_just_starting_stays(runtime: Runtime) -> None:
    with runtime.serving():
        timer = threading.Timer(SOON, lambda: runtime.used.append("sha256:tool"))
        timer.start()
        assert remove(runtime, starting_s=1.0) == RemovedImages(1, 40, 0)
        timer.join()
    assert set(runtime.images) == {"sha256:pause", "sha256:used", "sha256:tool"}


def test_an_image_that_was_pulled_meanwhile_stays(runtime: Runtime) -> None:
    with runtime.serving():
        timer = threading.Timer(SOON, lambda: runtime.images.update({"sha256:new": ("shop/new:1", 500)}))
        timer.start()
        assert remove(runtime, starting_s=1.0) == RemovedImages(2, 110, 0)
        timer.join()
    assert "sha256:new" in runtime.images


def test_nothing_is_removed_after_the_deadline(runtime: Runtime) -> None:
    with runtime.serving():
        assert remove(runtime, within_s=SOON, starting_s=5.0) == RemovedImages(0, 0, 2)
    assert len(runtime.images) == 4


IN_USE: Final = Failure(2, "delete image: image used by 5e7: image is in use by a container")


def test_an_image_that_the_runtime_refuses_to_remove_is_left(runtime: Runtime) -> None:
    """CRI-O's answer for an image of a container of podman, which it does not list."""
    runtime.refuses["sha256:tool"] = IN_USE
    with runtime.serving():
        assert remove(runtime) == RemovedImages(1, 40, 0, refused=1, refusal=f"tools/dump:2: {IN_USE.message}")
    assert set(runtime.images) == {"sha256:pause", "sha256:used", "sha256:tool"}


def test_an_image_is_tried_once(runtime: Runtime) -> None:
    runtime.refuses = {"sha256:tool": IN_USE, "sha256:old": Failure(9, "no")}
    with runtime.serving() as server:
        assert remove(runtime) == RemovedImages(0, 0, 0, refused=2, refusal=f"tools/dump:2: {IN_USE.message}")
    assert [method for method, _ in server.calls].count(f"{IMAGES}/RemoveImage") == 2
    assert len(runtime.images) == 4


def test_a_runtime_that_stops_answering_ends_the_action(runtime: Runtime) -> None:
    runtime.refuses["sha256:old"] = Failure(14, "the runtime shuts down")
    with runtime.serving() as server:
        assert remove(runtime) == RemovedImages(1, 70, 1, error="the runtime shuts down")
    assert server.calls[-1][0] == f"{IMAGES}/RemoveImage"


@pytest.mark.parametrize(
    ("removed", "result", "more"),
    [
        (RemovedImages(2, 110, 0), ReclaimResult.DONE, ""),
        (RemovedImages(2, 110, 1), ReclaimResult.TIMED_OUT, ""),
        (RemovedImages(2, 110, 0, 1, "a:1: in use"), ReclaimResult.DONE, "; the runtime refused 1, first a:1: in use"),
        (RemovedImages(0, 0, 1, 1, "a:1: in use"), ReclaimResult.FAILED, "; the runtime refused 1, first a:1: in use"),
        (RemovedImages(2, 110, 1, error="gone"), ReclaimResult.FAILED, "; /s: gone"),
    ],
)
def test_what_was_removed_is_in_the_result(removed: RemovedImages, result: ReclaimResult, more: str) -> None:
    text = f"removed {removed.images} images, {removed.bytes} bytes as the runtime counts them{more}"
    assert reclaim_runner.images_result(removed, "/s") == JobResult(result, text)


def test_a_runtime_that_does_not_answer_is_the_result_of_the_action(tmp_path: Path) -> None:
    action = ReclaimAction("images", ReclaimKind.IMAGES)
    order = ReclaimOrder("images", Signal.IMAGEFS, Tier.SOFT, 1, 2, 3.0)
    gone = str(tmp_path / "gone.sock")
    job = reclaim_runner.build_job(
        action, order, pod_logs_dir=lambda: "", cri_socket=lambda: gone, ended=lambda _: False
    )
    result = job(time.monotonic() + 5.0)
    assert result.result is ReclaimResult.FAILED
    assert result.message.startswith(f"{gone}: ")


def test_only_an_action_for_images_without_a_command_uses_the_socket() -> None:
    images = ReclaimAction("images", ReclaimKind.IMAGES)
    assert reclaim_runner.uses_socket(images, "/run/cri.sock")
    assert not reclaim_runner.uses_socket(images, "")
    assert not reclaim_runner.uses_socket(images._replace(command=("true",)), "/run/cri.sock")
    assert not reclaim_runner.uses_socket(ReclaimAction("journal", ReclaimKind.JOURNAL), "/run/cri.sock")
    assert reclaim_runner.missing_programs((images,), cri_socket="/run/cri.sock") == ()
