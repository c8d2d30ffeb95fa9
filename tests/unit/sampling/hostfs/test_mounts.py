"""Mount tables are parsed, whatever bytes they contain."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.sampling.hostfs.mounts import Mount, covering_mount, parse_mounts

MOUNTINFO = b"""\
21 26 0:20 / /sys rw,nosuid shared:7 - sysfs sysfs rw
26 1 254:0 / / rw,noatime shared:1 - ext4 /dev/vda rw
216 26 254:16 / /var/lib/containerd rw,noatime - ext4 /dev/vdb rw
217 26 0:44 /@data /mnt/with\\040space rw - btrfs /dev/vdc rw,subvol=/@data
"""


def test_mounts_are_parsed_with_their_escapes() -> None:
    mounts = parse_mounts(MOUNTINFO)
    assert [mount.point for mount in mounts] == ["/sys", "/", "/var/lib/containerd", "/mnt/with space"]
    assert mounts[1].device == os.makedev(254, 0)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("/", "/dev/vda"),
        ("/var/lib/containerd", "/dev/vdb"),
        ("/var/lib/containerd/x", "/dev/vdb"),
        ("/var/lib/containerdish", "/dev/vda"),
        ("/mnt/with space/a", "/dev/vdc"),
    ],
)
def test_the_deepest_mount_covers_a_path(path: str, source: str) -> None:
    mount = covering_mount(parse_mounts(MOUNTINFO), path)
    assert mount is not None
    assert mount.source == source


def test_of_two_mounts_at_one_point_the_later_is_on_top() -> None:
    lower, upper = (Mount(device, "/", "/data", "ext4", f"/dev/{device}", "") for device in (1, 2))
    assert covering_mount([lower, upper], "/data/x") == upper


@given(st.binary())
def test_any_bytes_are_parsed_as_a_mount_table(data: bytes) -> None:
    for mount in parse_mounts(data):
        assert mount.device >= 0


@given(st.lists(st.sampled_from([*MOUNTINFO.split(b"\n")[0].split(b" "), b"-", b"4294967296:1", b"\xff", b""])))
def test_a_line_of_shuffled_words_is_parsed_without_an_exception(words: list[bytes]) -> None:
    parse_mounts(b" ".join(words))
