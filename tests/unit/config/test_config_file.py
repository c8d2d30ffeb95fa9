"""Every way to change the configuration file is detected, and the changed keys are listed."""

import os
from pathlib import Path

import pytest

from nodeagent.config import load
from nodeagent.config.config_file import CHECK_EVERY_S, Change, ConfigFile, config_changes
from nodeagent.config.problems import ConfigError

HEAD = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"


def test_a_file_written_in_place_is_a_change(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(HEAD)
    file = ConfigFile(str(path), overrides=())
    file.load()
    assert not file.changed(now=0.0)
    path.write_text(HEAD + "mode: enforce\n")
    assert file.changed(now=CHECK_EVERY_S)
    file.load()
    assert not file.changed(now=2 * CHECK_EVERY_S)


def test_the_symlink_swap_of_a_config_map_volume_is_a_change(tmp_path: Path) -> None:
    for version in ("..1", "..2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "config.yaml").write_text(HEAD)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "config.yaml").symlink_to("..data/config.yaml")
    file = ConfigFile(str(tmp_path / "config.yaml"), overrides=())
    assert not file.changed(now=0.0)
    (tmp_path / "..data_tmp").symlink_to("..2")
    os.replace(tmp_path / "..data_tmp", tmp_path / "..data")
    assert file.changed(now=CHECK_EVERY_S)


def test_it_is_not_checked_more_often_than_needed(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(HEAD)
    file = ConfigFile(str(path), overrides=())
    assert not file.changed(now=0.0)
    path.write_text(HEAD + "mode: enforce\n")
    assert not file.changed(now=CHECK_EVERY_S / 2)


def test_a_missing_file_is_a_change_and_an_error_when_it_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(HEAD)
    file = ConfigFile(str(path), overrides=())
    path.unlink()
    assert file.changed(now=0.0)
    with pytest.raises(ConfigError, match="No such file"):
        file.load()


def test_without_a_file_nothing_ever_changes() -> None:
    assert not ConfigFile(None, overrides=()).changed(now=1e9)


def test_a_change_is_listed_key_by_key_with_both_values() -> None:
    before = load.loads(HEAD + "evictionHard: {memory.available: 500Mi}\n")
    after = load.loads(HEAD + "evictionHard: {memory.available: 1Gi, pid.available: 5%}\nmode: enforce\n")
    assert set(config_changes(before, after)) == {
        Change("mode", "dry-run", "enforce"),
        Change("evictionHard.memory.available", "500Mi", "1Gi"),
        Change("evictionHard.pid.available", "not set", "5%"),
    }
    assert config_changes(after, after) == ()
