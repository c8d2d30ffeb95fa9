"""A container that SELinux confines is reported where that keeps it from the host's directories."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nodeagent.runtime import selinux

CONTAINER = "system_u:system_r:container_t:s0:c123,c456\0"


def confined(tmp_path: Path, context: str, *directories: Path) -> list[str]:
    """The messages, of a process without capabilities, which the mode of a directory binds as SELinux binds root."""
    (tmp_path / "current").write_text(context)
    code = (
        "import sys; from nodeagent.runtime import selinux\n"
        "for note in selinux.confinement(sys.argv[2:], attribute=sys.argv[1]): print(note.message)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "current"), *map(str, directories)]
    if os.geteuid() == 0:
        command = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *command]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A directory that its reader may not open."""
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("needs setpriv (util-linux)")
    directory = tmp_path / "kubelet"
    directory.mkdir(mode=0o000)
    return directory


def test_a_container_type_that_may_not_read_a_directory_is_a_note_with_the_remedy(tmp_path: Path, closed: Path) -> None:
    (message,) = confined(tmp_path, CONTAINER, tmp_path, closed)
    assert message.startswith(
        f"SELinux runs the agent as container_t, which may not read {closed}: set `seLinuxOptions"
    )


@pytest.mark.parametrize(
    "context",
    [
        "system_u:system_r:spc_t:s0\0",
        "system_u:system_r:unconfined_service_t:s0",
        "cri-containerd.apparmor.d (enforce)\n",
        "unconfined\n",
        "",
    ],
)
def test_other_types_and_apparmor_are_none(tmp_path: Path, closed: Path, context: str) -> None:
    assert confined(tmp_path, context, closed) == []


def test_what_can_be_read_or_does_not_exist_is_none(tmp_path: Path, closed: Path) -> None:
    assert confined(tmp_path, CONTAINER, closed) != []
    assert confined(tmp_path, CONTAINER, tmp_path, tmp_path / "none") == []


def test_without_the_attribute_nothing_is_known(tmp_path: Path) -> None:
    assert selinux.confinement([str(tmp_path)], attribute=str(tmp_path / "none")) == ()
