"""Walks of trees whose owner moves directories meanwhile: nothing outside counts, and little is lost."""

import contextlib
import os
from pathlib import Path

import pytest

from nodeagent.sampling.disk.walk import TreeWalk
from tests.support.disk_trees import du


def test_a_subtree_moved_away_during_the_walk_is_not_followed(tmp_path: Path) -> None:
    """The parents of a deep directory are closed and opened again through `..`, if it is the same directory."""
    tree, elsewhere = tmp_path / "tree", tmp_path / "elsewhere"
    middle = tree.joinpath(*["d"] * 5)
    deep = middle.joinpath(*["d"] * 100)
    deep.mkdir(parents=True)
    siblings = [f"sibling-{number}" for number in range(40)]
    for name in siblings:
        (middle.parent / name).mkdir()
        (elsewhere / name / "treasure").mkdir(parents=True)
    with TreeWalk(os.open(tree, os.O_RDONLY)) as tree_walk:
        while os.path.lexists(middle):
            assert not tree_walk.step(entries=1)
            if tree_walk.usage.directories > 40 + 90:
                middle.rename(elsewhere / "moved")
        assert tree_walk.step()
        usage = tree_walk.usage
    assert usage.complete
    assert usage.inodes == 1 + 5 + 100 + 40, "it counted what is elsewhere"
    assert usage.unknown_reason in ("", "moved during the walk")


@pytest.fixture
def chains(tmp_path: Path) -> Path:
    """Three equal chains of directories, each with a directory beside it and files at both ends."""
    for number in range(3):
        chain = tmp_path / "tree" / f"{number}"
        deep = chain.joinpath(*["d"] * 100)
        deep.mkdir(parents=True)
        (chain / "side").mkdir()
        for path in (deep / "file", chain / "side" / "file"):
            path.write_bytes(b"x" * 100_000)
    return tmp_path / "tree"


def walk_deep(tree_walk: TreeWalk, tree: Path) -> Path:
    """Walk until the upper directories of the first chain are closed. Returns that chain."""
    while True:
        assert not tree_walk.step(entries=1)
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError, ValueError):
                parts = Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(tree).parts
                if len(parts) > 80:
                    return tree / parts[0]


def test_a_directory_moved_inside_the_tree_loses_nothing(chains: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with TreeWalk(os.open(chains, os.O_RDONLY)) as tree_walk:
        chain = walk_deep(tree_walk, chains)
        (chain / "d" / "d").rename(chain / "moved")
        assert tree_walk.step()
        usage = tree_walk.usage
    assert (usage.bytes, usage.inodes) == du(chains)
    assert (usage.complete, usage.unknown) == (True, 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_walk_loses_only_the_directory_that_left_the_tree(chains: Path) -> None:
    elsewhere = chains.parent / "elsewhere"
    (elsewhere / "treasure").mkdir(parents=True)
    with TreeWalk(os.open(chains, os.O_RDONLY)) as tree_walk:
        chain = walk_deep(tree_walk, chains)
        (chain / "d" / "d").rename(elsewhere / "moved")
        moved = chain.rename(elsewhere / "chain")
        assert tree_walk.step()
        usage = tree_walk.usage
    rest = du(chains)
    gone = du(elsewhere / "moved")[1] + du(moved)[1]
    assert usage.bytes is not None
    assert usage.bytes >= rest[0]
    assert rest[1] + 80 < usage.inodes <= rest[1] + gone, "it counted what is elsewhere"
    assert usage.complete
    assert usage.unknown_reason in ("", "moved during the walk")
