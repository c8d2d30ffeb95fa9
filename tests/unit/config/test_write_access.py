"""Write access of other users to the configuration."""

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeagent.actuators import reclaim_runner
from nodeagent.config import write_access
from nodeagent.config.config_file import ConfigFile
from nodeagent.config.problems import ConfigError
from nodeagent.config.schema import ReclaimAction
from tests.support.paths import REPOSITORY

CALM = REPOSITORY / "tests" / "data" / "nodes" / "cgroupv2-calm-8pods"
HEADER = "apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
OTHER_UID = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a file")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A configuration that no other user can change, below the sticky /tmp and directories of the test."""
    directory = tmp_path / "etc"
    directory.mkdir(mode=0o755)
    file = directory / "config.yaml"
    file.write_text(f"{HEADER}mode: enforce\n")
    file.chmod(0o644)
    return file


def _nothing(file: Path) -> None:
    pass


def _sticky(file: Path) -> None:
    file.parent.chmod(0o1777)


def _link(file: Path) -> None:
    file.rename(file.with_name("real"))
    file.symlink_to("real")


def _relative_link_above(file: Path) -> None:
    other = file.parent.parent / "other"
    other.mkdir(mode=0o755)
    file.rename(other / "real")
    file.symlink_to("../other/./real")


def _group_of_root(file: Path) -> None:
    os.chown(file, 0, 0)
    file.chmod(0o664)


@pytest.mark.parametrize("prepare", [_nothing, _sticky, _link, _relative_link_above])
def test_a_file_that_no_other_user_can_change(file: Path, prepare: Callable[[Path], None]) -> None:
    prepare(file)
    assert write_access.find_write_access(str(file)) is None
    assert ConfigFile(str(file), overrides=()).load().warnings == ()


@as_root
def test_the_group_of_root_is_trusted(file: Path) -> None:
    _group_of_root(file)
    assert write_access.find_write_access(str(file)) is None


@as_root
def test_an_access_control_list_behind_the_group_of_root_is_seen(file: Path) -> None:
    no_id, owner, group, mask, others = 0xFFFFFFFF, 0x01, 0x04, 0x10, 0x20  # linux/posix_acl.h, posix_acl_xattr.h
    entries = [(owner, 6, no_id), (0x02, 6, OTHER_UID), (group, 4, no_id), (mask, 6, no_id), (others, 4, no_id)]
    packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(file, "system.posix_acl_access", packed)
    except OSError as error:
        pytest.skip(f"a file system without access control lists: {error.strerror}")
    found = write_access.find_write_access(str(file))
    assert found is not None
    assert "group" in found.reason


def _open_file(file: Path) -> Path:
    file.chmod(0o666)
    return file


def _group_file(file: Path) -> Path:
    os.chown(file, -1, OTHER_UID)
    file.chmod(0o664)
    return file


def _owned_file(file: Path) -> Path:
    os.chown(file, OTHER_UID, -1)
    return file


def _open_directory(file: Path) -> Path:
    file.parent.chmod(0o777)
    return file.parent


def _owned_directory(file: Path) -> Path:
    os.chown(file.parent, OTHER_UID, -1)
    return file.parent


def _owned_in_sticky(file: Path) -> Path:
    file.parent.chmod(0o1777)
    return _owned_file(file)


def _owned_sticky(file: Path) -> Path:
    file.parent.chmod(0o1777)
    return _owned_directory(file)


def _open_directory_above(file: Path) -> Path:
    file.parent.parent.chmod(0o777)
    return file.parent.parent


def _link_into_an_open_directory(file: Path) -> Path:
    other = file.parent.parent / "open"
    other.mkdir()
    other.chmod(0o777)
    file.rename(other / "real")
    file.symlink_to(other / "real")
    return other


def _link_in_an_open_directory(file: Path) -> Path:
    other = file.parent.parent / "open"
    other.mkdir()
    (other / "link").symlink_to(file.parent / "safe")
    other.chmod(0o777)
    file.rename(file.parent / "safe")
    file.symlink_to("../open/link")
    return other


def _strangers_link_in_a_sticky_directory(file: Path) -> Path:
    other = file.parent.parent / "sticky"
    other.mkdir()
    other.chmod(0o1777)
    (other / "link").symlink_to(file.parent / "safe")
    os.chown(other / "link", OTHER_UID, -1, follow_symlinks=False)
    file.rename(file.parent / "safe")
    file.symlink_to("../sticky/link")
    return other / "link"


OPEN = (
    _open_file,
    _group_file,
    _owned_file,
    _open_directory,
    _owned_directory,
    _owned_in_sticky,
    _owned_sticky,
    _open_directory_above,
    _link_into_an_open_directory,
    _link_in_an_open_directory,
    _strangers_link_in_a_sticky_directory,
)


@as_root
@pytest.mark.parametrize("prepare", OPEN)
def test_write_access_of_other_users_is_rejected_with_a_command_that_removes_it(
    file: Path, prepare: Callable[[Path], Path], tmp_path: Path
) -> None:
    opened = prepare(file)
    found = write_access.find_write_access(str(file))
    assert found is not None
    assert found.path == str(opened)
    with pytest.raises(ConfigError) as refused:
        ConfigFile(str(file), overrides=()).load()
    (problem,) = refused.value.problems
    assert str(file) in str(problem)
    assert f"run `{found.fix}`" in str(problem)
    subprocess.run(found.fix.split(), check=True)
    after = write_access.find_write_access(str(file))
    assert after is None or after != found, "the command removes this access"


@as_root
@pytest.mark.parametrize("prepare", OPEN)
def test_a_dry_run_warns_and_goes_on(file: Path, prepare: Callable[[Path], Path]) -> None:
    file.write_text(HEADER)
    prepare(file)
    (warning,) = ConfigFile(str(file), overrides=()).load().warnings
    assert "run commands as this user (root)" in str(warning)


@as_root
def test_a_profile_that_enforces_in_an_open_file_is_rejected(file: Path) -> None:
    profile = "profiles: [{name: a, nodeSelector: {a: b}, mode: %s}]\n"
    file.write_text(HEADER + profile % "dry-run")
    file.chmod(0o666)
    assert ConfigFile(str(file), overrides=()).load().warnings
    file.write_text(HEADER + profile % "enforce")
    with pytest.raises(ConfigError):
        ConfigFile(str(file), overrides=()).load()


def test_a_dry_run_with_a_kubeconfig_in_an_open_file_is_rejected(file: Path) -> None:
    """A kubeconfig may have an `exec` plugin, which is run whatever the mode is."""
    file.write_text(f"{HEADER}cluster: {{kubeconfig: /etc/kubernetes/admin.conf}}\n")
    file.chmod(0o666)
    with pytest.raises(ConfigError, match="is writable for all users"):
        ConfigFile(str(file), overrides=()).load()


@as_root
def test_an_open_kubeconfig_is_a_warning(file: Path) -> None:
    kubeconfig = file.with_name("kubeconfig")
    kubeconfig.write_text("")
    kubeconfig.chmod(0o666)
    file.write_text(f"{HEADER}mode: enforce\ncluster: {{kubeconfig: {kubeconfig}}}\n")
    (warning,) = ConfigFile(str(file), overrides=()).load().warnings
    assert f"{kubeconfig} is writable for all users (mode 0666), and its `exec` runs as this user" in str(warning)


@as_root
def test_an_open_program_of_an_action_is_reported_before_it_is_needed(tmp_path: Path) -> None:
    program = tmp_path / "clean-up"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    action = ReclaimAction("tidy", command=(str(program),))
    assert reclaim_runner.missing_programs((action,), cri_socket="") == ()
    program.chmod(0o777)
    (note,) = reclaim_runner.missing_programs((action,), cri_socket="")
    assert note.message == (
        f"tidy runs {program} as this agent's user, and {program} is writable for all users (mode 0777): "
        f"run `chmod go-w {program}`"
    )


def test_a_path_of_links_without_end_or_to_nowhere_is_not_taken_for_safe(file: Path) -> None:
    loop = file.with_name("loop")
    loop.symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        write_access.find_write_access(str(loop))
    with pytest.raises(FileNotFoundError):
        write_access.find_write_access(str(file.with_name("nowhere")))


# --- the program ------------------------------------------------------------------------------------------------------


def run_enforcing(config: Path, *before: str) -> subprocess.CompletedProcess[str]:
    dropped = ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "NODE_NAME", "NODEAGENT_MODE", "HOME")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    command = [*before, sys.executable, "-P", "-m", "nodeagent", "run", "--once", "--config", str(config)]
    return subprocess.run(
        command, env={**kept, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=60, check=False
    )


NO_PODS = "sampling: {cgroupRoot: /nodeagent-test-none}\n"
"""An agent that acts on pods of this machine may belong to another test."""
NO_CREDENTIALS = "mode enforce needs the API server, but there are no credentials"
"""How a start ends that has taken the configuration, on a machine without a cluster."""


@as_root
def test_run_refuses_to_enforce_what_others_may_write(file: Path, tmp_path: Path) -> None:
    file.write_text(f"{HEADER}mode: enforce\nstateDir: {tmp_path / 'state'}\nmetrics: {{address: ''}}\n{NO_PODS}")
    assert NO_CREDENTIALS in run_enforcing(file).stderr
    file.chmod(0o666)
    done = run_enforcing(file)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr == (
        f"nodeagent: {file}: {file} is writable for all users (mode 0666), and a change of the configuration "
        f"can evict pods and run commands as this user (root); run `chmod go-w {file}`\n"
    )


@as_root
def test_a_configmap_volume_is_taken_although_its_modes_are_open(tmp_path: Path) -> None:
    """As a kubelet makes it (pkg/volume/util/atomic_writer.go): a tmpfs of mode 0777, links, and for a container
    mounted read-only; here with `defaultMode: 0666` on top."""
    volume = tmp_path / "volume"
    volume.mkdir()
    script = (
        f"set -e; mount -t tmpfs -o mode=0777 tmpfs {volume}; cd {volume}; mkdir ..2026_11_23; "
        f"printf '%s' '{HEADER}mode: enforce\nstateDir: {tmp_path / 'state'}\nmetrics: {{address: \"\"}}\n{NO_PODS}' "
        "> ..2026_11_23/config.yaml; chmod 0666 ..2026_11_23/config.yaml; ln -s ..2026_11_23 ..data; "
        'ln -s ..data/config.yaml config.yaml; cd /; [ -z "$RO" ] || mount -o remount,bind,ro $VOLUME; exec "$@"'
    )
    inside = ("unshare", "--mount", "env", f"VOLUME={volume}")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    mounted = run_enforcing(volume / "config.yaml", *inside, "RO=1", "sh", "-c", script, "sh")
    assert NO_CREDENTIALS in mounted.stderr
    writable = run_enforcing(volume / "config.yaml", *inside, "RO=", "sh", "-c", script, "sh")
    assert f"{volume} is writable for all users (mode 0777)" in writable.stderr
