"""The note about a fork storm names who forks, and is the same for as long as that one does."""

import pytest

from nodeagent.model import Pod, PodSource, PodUsage, PodView, QOSClass
from nodeagent.sampling.events import fork_storm


def view(uid: str, namespace: str, name: str, *, running: bool = True) -> PodView:
    usage = PodUsage(uid, QOSClass.BEST_EFFORT, f"/{uid}", 0.0) if running else None
    return PodView(Pod(uid, uid, namespace, name, PodSource.API, QOSClass.BEST_EFFORT), usage)


PODS = (view("u1", "shop", "bomb"), view("u2", "shop", "calm"), view("u3", "", ""), view("u4", "x", "y", running=False))


@pytest.mark.parametrize(
    ("rates", "who"),
    [
        ({"u1": 1600.0, "host": 30.0, "u2": 500.0}, "shop/bomb"),
        ({"u2": 499.0, "u1": 900.0}, "shop/bomb"),
        ({"u1": 1.0, "u3": 5000.0}, "uid/u3"),
        ({"gone": 5000.0}, "uid/gone"),
        ({"u1": 400.0, "host": 2000.0}, "the host"),
        ({"unknown": 700.0, "u1": 600.0}, "unknown pods"),
        ({}, "unknown pods"),
    ],
)
def test_the_note_names_who_forks_most(rates: dict[str, float], who: str) -> None:
    note = fork_storm.note(rates, PODS)
    assert note.message == (
        f"fork storm: more than 1000 new processes and threads a second, the largest number in {who}"
    )
