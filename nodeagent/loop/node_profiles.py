"""The profiles of the configuration on this node, by the labels of its Node object.

Promises:

1. Until the labels are known, nothing is enforced: the profile of this node may be more cautious than the file
   (`load.for_node`).
2. Labels once seen stay in force while the API server does not answer or the Node object is missing, also in the next
   process on this boot.
"""

from collections.abc import Mapping
from typing import NamedTuple

from nodeagent.config import load, show
from nodeagent.config.load import LoadedConfig
from nodeagent.model import Note, NoteKind


class SavedLabels(NamedTuple):
    """The labels of a Node object when they were last seen."""

    node: str
    labels: Mapping[str, str]


class NodeProfiles:
    """The newest labels of this node."""

    def __init__(self, node: str, saved: SavedLabels | None) -> None:
        """`saved`: those that an earlier process saw last; of another node they are ignored."""
        self._node = node
        self._labels = saved.labels if saved is not None and saved.node == node else None
        self._fresh = False

    @property
    def saved(self) -> SavedLabels | None:
        """For the state; None while the labels are not known."""
        return SavedLabels(self._node, self._labels) if self._labels is not None else None

    def observe(self, labels: Mapping[str, str] | None) -> bool:
        """The labels of the API server; None: not read. True if they differ from the last ones."""
        if labels is None:
            return False
        self._fresh = True
        if labels == self._labels:
            return False
        self._labels = labels
        return True

    def apply(self, loaded: LoadedConfig) -> LoadedConfig:
        """The configuration of this node."""
        return load.for_node(loaded, self._labels)

    def notes(self, loaded: LoadedConfig) -> tuple[Note, ...]:
        """Which profiles apply, and whether the labels are old; empty for a file without profiles."""
        active = show.active_profiles(loaded)
        if active is None:
            return ()
        old = self._labels is not None and not self._fresh
        since = "; by the labels that an earlier process saw, until the API server answers" if old else ""
        return (Note(NoteKind.PROFILES, f"{active}{since}"),)


def active(loaded: LoadedConfig) -> Mapping[str, bool]:
    """Each profile of the file and whether it applies."""
    return {each.name: each.name in (loaded.active or ()) for each in loaded.config.profiles}
