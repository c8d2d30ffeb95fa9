"""Notices that the configuration file changed, and says what a change means.

A ConfigMap volume swaps a symbolic link, an editor renames a new file over the old one, `tee` writes in place: what all
three change is the (device, inode, mtime, size) of what the path leads to.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from nodeagent.config import load, show, write_access
from nodeagent.config.load import LoadedConfig, Override
from nodeagent.config.problems import ConfigError, Origin, Problem
from nodeagent.config.schema import Mode

LOOK_EVERY_S: Final = 5.0
"""A stat costs 2 us. The kubelet itself takes up to a minute to update a ConfigMap volume."""


_TRIES: Final = 3
"""A kubelet swaps a ConfigMap's link at once. A file that was just read and is gone twice more is somebody's game."""


class Change(NamedTuple):
    """One key whose effective value is another one now."""

    key: str
    before: str
    after: str


class ConfigFile:
    """The file that the agent was started with."""

    def __init__(self, path: str | None, *, overrides: tuple[Override, ...]) -> None:
        self.path = path
        self._overrides = overrides
        self._seen = self._stamp()
        self._looked_at = float("-inf")

    def load(self) -> LoadedConfig:
        """Read it anew. Raises ConfigError with every problem, or when others may change the file and it is to be
        acted on."""
        self._seen = self._stamp()
        loaded = load.load(self.path, overrides=self._overrides)
        return loaded if self.path is None else _judge_write_access(loaded, self.path)

    def changed(self, *, now: float) -> bool:
        """Whether the file is another one than at the last `load`; looks at most every `LOOK_EVERY_S`."""
        if self.path is None or now - self._looked_at < LOOK_EVERY_S:
            return False
        self._looked_at = now
        return self._stamp() != self._seen

    def _stamp(self) -> tuple[int, ...] | None:
        try:
            status = os.stat(self.path) if self.path is not None else None
        except OSError:
            return None  # gone for a moment, or for good: `load` says so
        return None if status is None else (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


def _judge_write_access(loaded: LoadedConfig, path: str) -> LoadedConfig:
    """The same, with a warning where others may change the file or the kubeconfig that it names. Raises ConfigError
    where whoever may do that has pods evicted or commands run in our name."""
    problem = _write_access(path, "", "whoever may change the configuration has pods evicted and commands run as this")
    from_file = loaded.origin("cluster.kubeconfig").source == path
    if problem is not None and (loaded.config.mode is Mode.ENFORCE or from_file):
        raise ConfigError((problem,))
    kubeconfig = loaded.config.cluster.kubeconfig
    named = kubeconfig and os.path.exists(kubeconfig)
    other = _write_access(kubeconfig, "cluster.kubeconfig", "its `exec` runs as this") if named else None
    return loaded._replace(warnings=(*loaded.warnings, *(each for each in (problem, other) if each is not None)))


def _write_access(path: str, key: str, why: str) -> Problem | None:
    found = None
    for attempt in range(_TRIES):
        try:
            found = write_access.find(path)
            break
        except OSError as error:
            if attempt == _TRIES - 1:
                return Problem(Origin(path), key, f"who may change it is not known: {error.strerror}", "try again")
    if found is None:
        return None
    by = "root" if os.geteuid() == 0 else f"UID {os.geteuid()}"
    return Problem(Origin(path), key, f"{found.path} {found.reason}, and {why} user ({by})", f"run `{found.mend}`")


def config_changes(before: LoadedConfig, after: LoadedConfig) -> tuple[Change, ...]:
    """What is different, by key path, in the order of the keys."""
    old, new = dict(_flat("", _plain(before))), dict(_flat("", _plain(after)))
    keys = [*old, *(key for key in new if key not in old)]
    return tuple(
        Change(key, old.get(key, "not set"), new.get(key, "not set")) for key in keys if old.get(key) != new.get(key)
    )


def _plain(loaded: LoadedConfig) -> Any:
    import yaml

    return yaml.safe_load(show.show(loaded))


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), item)
    else:
        yield path, str(value)
