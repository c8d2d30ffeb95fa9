"""The kubelet's arguments in the configuration of k3s."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config import k3s

FIRST = ("/etc/rancher/k3s/config.yaml", "kubelet-arg: [a=1, b=2]\ntoken: secret\n")


def test_a_later_file_replaces_the_arguments_and_a_plus_adds_to_them() -> None:
    assert k3s.read_settings([FIRST, ("b.yaml", "kubelet-arg: c=3\n")], ()).kubelet_flags == ("--c=3",)
    assert k3s.read_settings([FIRST, ("b.yaml", "kubelet-arg+: [c=3]\n")], ()).kubelet_flags == (
        "--a=1",
        "--b=2",
        "--c=3",
    )


def test_arguments_of_the_command_line_come_last_in_both_spellings() -> None:
    words = ("server", "--kubelet-arg=x=1", "--kubelet-arg", "y=2", "--data-dir", "/data/k3s/")
    found = k3s.read_settings([FIRST], words)
    assert found.kubelet_flags == ("--a=1", "--b=2", "--x=1", "--y=2")
    assert found.data_directory == "/data/k3s"


def test_a_file_that_is_no_yaml_makes_the_arguments_unknown() -> None:
    found = k3s.read_settings([FIRST, ("broken.yaml", "kubelet-arg: [")], ())
    assert "broken.yaml" in found.unread
    assert k3s.read_settings([("empty.yaml", "  \n")], ()).unread == ""


def test_files_of_arguments_that_k3s_copies_into_its_drop_ins_are_not_read_twice() -> None:
    settings = k3s.read_settings([("c", "kubelet-arg: [config=/etc/k.yaml, eviction-hard=memory.available<1Gi]")], ())
    assert k3s.with_drop_ins(settings) == ("--eviction-hard=memory.available<1Gi",)


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        ([], ["--eviction-hard=imagefs.available<5%,nodefs.available<5%"]),
        (["eviction-hard=memory.available<1Gi"], ["--eviction-hard=memory.available<1Gi"]),
        (["eviction-hard=a<1", "eviction-hard=b<2"], ["--eviction-hard=a<1", "--eviction-hard=b<2"]),
        (
            ["eviction-hard+=memory.available<1Gi"],
            ["--eviction-hard=imagefs.available<5%,nodefs.available<5%", "--eviction-hard=memory.available<1Gi"],
        ),
        (
            ["eviction-hard-=nodefs.available<1%"],
            ["--eviction-hard=nodefs.available<1%", "--eviction-hard=imagefs.available<5%,nodefs.available<5%"],
        ),
        (["eviction-hard=a<1", "eviction-hard-=b<2"], ["--eviction-hard=b<2", "--eviction-hard=a<1"]),
    ],
)
def test_without_drop_ins_an_argument_of_the_user_replaces_that_of_k3s(arguments: list[str], flags: list[str]) -> None:
    """A repeated flag adds to the map of the kubelet, so that its own must be left out."""
    settings = k3s.K3sSettings(tuple(f"--{each}" for each in arguments))
    found = k3s.without_drop_ins(settings)
    assert [each for each in found if "eviction-hard" in each] == flags
    assert "--eviction-minimum-reclaim=imagefs.available=10%,nodefs.available=10%" in found


def test_an_argument_without_a_value_is_true() -> None:
    assert k3s.with_drop_ins(k3s.K3sSettings(("--fail-swap-on",))) == ("--fail-swap-on=true",)


@given(
    files=st.lists(st.tuples(st.text(max_size=5), st.text(max_size=60)), max_size=3),
    words=st.lists(st.one_of(st.text(max_size=8), st.sampled_from(["--kubelet-arg", "--data-dir", "-d"])), max_size=4),
)
def test_no_content_of_its_files_or_command_line_raises(files: list[tuple[str, str]], words: list[str]) -> None:
    settings = k3s.read_settings(files, words)
    flags = (*k3s.with_drop_ins(settings), *k3s.without_drop_ins(settings))
    assert all(flag.startswith("--") for flag in flags)
