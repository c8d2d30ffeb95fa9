"""Remembers the layers of ended containers of pods that still exist.

The kubelet keeps an ended container for its logs. Its layer stays on disk, but is no longer mounted, so that only an
earlier measurement shows of which pod it is. Promises:

1. A layer counts until its directory is gone, which the container runtime removes with the container, or until its pod
   is gone.
2. A pod never has another pod's layer. containerd never uses a number of a directory again, and CRI-O draws the names.
   In case the store was made again, a directory that is mounted for another container is dropped, and all are after
   `_MAX_AGE_S` without a measurement.
3. At most `_MAX_OF_POD` layers of a pod are remembered, the newest.
"""

import os
from collections.abc import Collection, Iterator
from typing import Final

from nodeagent.sampling.disk import pod_paths
from nodeagent.sampling.disk.pod_paths import Kind, PodPath, PodPaths

_MAX_OF_POD: Final = 64
"""The kubelet keeps one ended container for each container of a pod by default."""
_MAX_AGE_S: Final = 600.0
"""As far as a trace reaches back."""


class EndedLayers:
    """The layers that measurements have found. Not thread-safe."""

    def __init__(self) -> None:
        self._layers: dict[str, dict[PodPath, None]] = {}
        """UID -> its layers, those that were found last at the end."""
        self._measured_at = 0.0

    def add_to(self, found: PodPaths, uids: Collection[str], *, all_pods: bool, now: float) -> PodPaths:
        """The paths of these pods with their ended layers. With `all_pods` the layers of other pods are dropped."""
        if now - self._measured_at > _MAX_AGE_S:
            self._layers.clear()
        self._measured_at = now
        if all_pods:
            self._layers = {uid: layers for uid, layers in self._layers.items() if uid in uids}
        self._drop_mounted(found)
        for path in found.paths:
            if path.kind is Kind.LAYER:
                layers = self._layers.setdefault(path.uid, {})
                layers.pop(path, None)
                layers[path] = None
        return found._replace(paths=found.paths + tuple(self._ended(uids, set(found.paths))))

    def remove(self, path: PodPath) -> None:
        """The path does not exist."""
        self._layers.get(path.uid, {}).pop(path, None)

    def _drop_mounted(self, found: PodPaths) -> None:
        """Drop the layers that are mounted for another container."""
        ended = {path for layers in self._layers.values() for path in layers}.difference(found.paths)
        if not ended:
            return
        containers = {pod_paths.upper_directory(mount): name for name, mount in found.layers.items()}
        for path in ended:
            if containers.get(os.path.join(path.base, *path.below), path.name) != path.name:
                self.remove(path)

    def _ended(self, uids: Collection[str], listed: set[PodPath]) -> Iterator[PodPath]:
        for uid in uids:
            layers = self._layers.get(uid, {})
            ended = [path for path in layers if path not in listed]
            for path in ended[:-_MAX_OF_POD]:
                del layers[path]
            yield from ended[-_MAX_OF_POD:]
