"""Pods with what a reader knows of them, made again only once the pods or that have changed."""

from collections.abc import Callable

from nodeagent.model import Pod


class JoinedPods:
    """The last result. The same pods and the same version give the same tuple, so that a call in every sync costs
    nothing, and what the policy keeps by pods stays valid."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: tuple[tuple[Pod, ...], object, tuple[Pod, ...]] = ((), None, ())
        """Pods, version and result; one assignment, because not only the loop asks for pods."""

    def joined(
        self, pods: tuple[Pod, ...], version: object, join: Callable[[tuple[Pod, ...]], tuple[Pod, ...]]
    ) -> tuple[Pod, ...]:
        """`join(pods)`, or its last result. `version` changes with what `join` reads, and is read before it, so that a
        change meanwhile counts in the next call."""
        last_pods, last_version, result = self._last
        if pods is not last_pods or version != last_version:
            result = join(pods)
            self._last = pods, version, result
        return result
