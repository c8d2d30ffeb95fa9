"""The kubelet's arguments in the arguments of k3s."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.config import k3s


def test_the_words_of_the_annotation_give_the_arguments_and_the_data_directory() -> None:
    """As getNodeArgs in pkg/nodeconfig of k3s-io/k3s makes them, and as its command line may have been."""
    words = ("server", "--kubelet-arg", "x=1", "--token", "********", "--kubelet-arg=y=2", "--data-dir", "/data/k3s/")
    found = k3s.read_settings(words)
    assert found.kubelet_flags == ("--x=1", "--y=2")
    assert found.data_directory == "/data/k3s"
    assert k3s.read_settings(("server",)) == ((), "/var/lib/rancher/k3s")


def test_an_argument_with_dashes_of_its_own_is_read() -> None:
    """k3s splits `--kubelet-arg --a=1` into three words, `--kubelet-arg=--a=1` into two."""
    words = ("agent", "--kubelet-arg", "--a", "1", "--kubelet-arg", "--b=2", "--kubelet-arg", "--c", "--kubelet-arg")
    assert k3s.read_settings(words).kubelet_flags == ("--a=1", "--b=2", "--c", "--")


def test_files_of_arguments_that_k3s_copies_into_its_drop_ins_are_not_read_twice() -> None:
    settings = k3s.K3sSettings(("--config=/etc/k.yaml", "--eviction-hard=memory.available<1Gi"))
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


@given(st.lists(st.one_of(st.text(max_size=8), st.sampled_from(["--kubelet-arg", "--data-dir", "-d"])), max_size=6))
def test_no_annotation_raises(words: list[str]) -> None:
    settings = k3s.read_settings(words)
    flags = (*k3s.with_drop_ins(settings), *k3s.without_drop_ins(settings))
    assert all(flag.startswith("--") for flag in flags)
