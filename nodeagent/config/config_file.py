"""Detect a change of the configuration file and list the changed keys.

A ConfigMap volume replaces a symbolic link, an editor renames a new file over the old one, `tee` writes in place. Each
of them changes the device, inode, mtime or size of the file at the end of the path.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from nodeagent.config import load, show, write_access
from nodeagent.config.load import LoadedConfig, Override
from nodeagent.config.problems import ConfigError, Origin, Problem

CHECK_EVERY_S: Final = 5.0
"""A stat costs 2 us. The kubelet itself takes up to a minute to update a ConfigMap volume."""

_MAX_ATTEMPTS: Final = 3
"""A kubelet replaces a ConfigMap's link atomically. A file that was just read and is then missing three times is being
manipulated."""


class Change(NamedTuple):
    """One key whose effective value changed."""

    key: str
    before: str
    after: str


class ConfigFile:
    """The file of `--config`, or none."""

    def __init__(self, path: str | None, *, overrides: tuple[Override, ...]) -> None:
        self.path = path
        self._overrides = overrides
        self._loaded_stamp = self._stamp()
        self._checked_at = float("-inf")

    def load(self) -> LoadedConfig:
        """Read the file again. Raises ConfigError with every problem, or if other users can change a file that
        enforces."""
        self._loaded_stamp = self._stamp()
        loaded = load.load(self.path, overrides=self._overrides)
        return loaded if self.path is None else _judge_write_access(loaded, self.path)

    def changed(self, *, now: float) -> bool:
        """True if the file differs from the last `load`. Checks once in `CHECK_EVERY_S`; False in between."""
        if self.path is None or now - self._checked_at < CHECK_EVERY_S:
            return False
        self._checked_at = now
        return self._stamp() != self._loaded_stamp

    def _stamp(self) -> tuple[int, ...] | None:
        try:
            status = os.stat(self.path) if self.path is not None else None
        except OSError:
            return None  # missing for a moment or for good: `load` reports it
        return None if status is None else (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


def _judge_write_access(loaded: LoadedConfig, path: str) -> LoadedConfig:
    """Add a warning if other users can change the file or its kubeconfig. Raises ConfigError if they could thereby
    evict pods or run commands as the agent's user."""
    problem = _write_access(path, "", "a change of the configuration can evict pods and run commands as this")
    from_file = loaded.origin("cluster.kubeconfig").source == path
    if problem is not None and (load.may_enforce(loaded) or from_file):
        raise ConfigError((problem,))
    kubeconfig = loaded.config.cluster.kubeconfig
    exists = kubeconfig and os.path.exists(kubeconfig)
    in_kubeconfig = _write_access(kubeconfig, "cluster.kubeconfig", "its `exec` runs as this") if exists else None
    found = tuple(each for each in (problem, in_kubeconfig) if each is not None)
    return loaded._replace(warnings=(*loaded.warnings, *found))


def _write_access(path: str, key: str, effect: str) -> Problem | None:
    found = None
    for attempt in range(_MAX_ATTEMPTS):
        try:
            found = write_access.find_write_access(path)
            break
        except OSError as error:
            if attempt == _MAX_ATTEMPTS - 1:
                return Problem(Origin(path), key, f"its write access is unknown: {error.strerror}", "try again")
    if found is None:
        return None
    user = "root" if os.geteuid() == 0 else f"UID {os.geteuid()}"
    return Problem(Origin(path), key, f"{found.path} {found.reason}, and {effect} user ({user})", f"run `{found.fix}`")


def config_changes(before: LoadedConfig, after: LoadedConfig) -> tuple[Change, ...]:
    """The changed keys by path, in the order of the keys."""
    old, new = dict(_flatten("", _to_plain(before))), dict(_flatten("", _to_plain(after)))
    keys = [*old, *(key for key in new if key not in old)]
    return tuple(
        Change(key, old.get(key, "not set"), new.get(key, "not set")) for key in keys if old.get(key) != new.get(key)
    )


def _to_plain(loaded: LoadedConfig) -> Any:
    import yaml

    return yaml.safe_load(show.show(loaded))


def _flatten(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(f"{path}.{key}" if path else str(key), item)
    else:
        yield path, str(value)
