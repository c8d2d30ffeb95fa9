"""The OOM killer ends the processes of whom the agent would evict next, and every score returns to the kubelet's."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from nodeagent.actuators.oom_scores import REFRESH_S, RETRY_S, OomScores, RaisedScore
from nodeagent.loop.state_store import AgentState
from nodeagent.model import QOSClass
from nodeagent.policy import state as policy_state
from nodeagent.policy.oom_preference import OomTarget
from nodeagent.records.state_file import StateFile
from nodeagent.sampling.hostfs.host import Host
from tests.support.freezer_cgroups import until
from tests.support.livenode import Kubepods, needs_cgroup_v1
from tests.support.mounts import mounted, root_only

MIB: Final = 1 << 20
NODE: Final = 1 << 40
"""So large that no process has a thousandth of it."""


# --- real processes --------------------------------------------------------------------------------------------------


@pytest.fixture
def kubepods() -> Iterator[Kubepods]:
    made = Kubepods(limit=256 * MIB)
    yield made
    made.close()


def start(kubepods: Kubepods, uid: str, score: int, *, mib: int = 0, qos: str = "burstable") -> Path:
    """A pod with a process that has this score. Returns the file of its score."""
    kubepods.start(uid, qos=qos)
    root = Path("/sys/fs/cgroup/memory") / kubepods.root / "kubepods" / qos / f"pod{uid}"
    [procs] = root.glob("*/cgroup.procs")
    path = Path(f"/proc/{procs.read_text().strip()}/oom_score_adj")
    path.write_text(str(score))
    if mib:
        kubepods.eat(uid, mib)
    return path


def target(kubepods: Kubepods, uid: str, qos: QOSClass = QOSClass.BURSTABLE) -> OomTarget:
    return OomTarget(f"shop/{uid}", uid, f"/{kubepods.root}/kubepods/{qos.lower()}/pod{uid}", qos)


def read(path: Path) -> int:
    return int(path.read_text())


def raise_scores(scores: OomScores, *targets: OomTarget, node_bytes: int = NODE, now: float = 0.0) -> None:
    if scores.plan(targets, node_bytes=node_bytes, now=now, acts=True):
        scores.apply(saved=True)


@pytest.mark.real_cgroup
@needs_cgroup_v1
@pytest.mark.parametrize("raised", [False, True], ids=["the-kernel-alone", "raised"])
def test_the_oom_killer_ends_the_pod_that_would_be_evicted_and_not_the_largest(
    kubepods: Kubepods, raised: bool
) -> None:
    start(kubepods, "next", 100, mib=60)
    start(kubepods, "large", 100, mib=110)
    if raised:
        raise_scores(OomScores(Host("/")), target(kubepods, "next"))
    kubepods.eat("large", 120, to_the_end=raised)  # more than the limit without what the processes began with
    killed, other = ("next", "large") if raised else ("large", "next")
    until(lambda: not kubepods.running(killed), f"{killed} is killed")
    assert kubepods.running(other)


@pytest.mark.real_cgroup
@needs_cgroup_v1
def test_a_score_is_put_back_when_the_pressure_ends_and_when_another_pod_is_next(kubepods: Kubepods) -> None:
    one, other = start(kubepods, "one", 400), start(kubepods, "other", 300)
    scores = OomScores(Host("/"))
    raise_scores(scores, target(kubepods, "one"))
    assert (read(one), read(other), scores.pods) == (999, 300, 1)
    raise_scores(scores, target(kubepods, "other"), now=REFRESH_S)
    assert (read(one), read(other), scores.pods) == (400, 999, 1)
    raise_scores(scores, now=0.2)
    assert (read(one), read(other), scores.active) == (400, 300, ())


@pytest.mark.real_cgroup
@needs_cgroup_v1
def test_an_order_that_changes_in_every_sync_costs_one_scan_a_second(kubepods: Kubepods) -> None:
    one, other = start(kubepods, "one", 400), start(kubepods, "other", 300)
    scores = OomScores(Host("/"))
    raise_scores(scores, target(kubepods, "one"), now=0.0)
    raise_scores(scores, target(kubepods, "other"), now=REFRESH_S * 0.9)
    assert (read(one), read(other)) == (999, 300)
    raise_scores(scores, now=REFRESH_S * 0.95)
    assert (read(one), read(other)) == (400, 300), "the end of the pressure does not wait"


@pytest.mark.real_cgroup
@needs_cgroup_v1
def test_the_next_process_puts_back_what_a_killed_one_raised(kubepods: Kubepods, tmp_path: Path) -> None:
    path = start(kubepods, "one", 400)
    scores = OomScores(Host("/"))
    raise_scores(scores, target(kubepods, "one"))
    store = StateFile(tmp_path / "state", shape=AgentState, boot_id="boot")
    store.save(AgentState(policy_state.initial("i", now=0.0), oom_scores=scores.active))
    restarted = OomScores(Host("/"), store.load().value.oom_scores)
    assert read(path) == 999
    restarted.put_back_leftover()
    assert (read(path), restarted.active) == (400, ())


@pytest.mark.real_cgroup
@needs_cgroup_v1
def test_nothing_is_raised_that_is_not_saved_and_a_plan_alone_leaves_nothing_behind(kubepods: Kubepods) -> None:
    path = start(kubepods, "one", 400)
    scores = OomScores(Host("/"))
    assert scores.plan([target(kubepods, "one")], node_bytes=NODE, now=0.0, acts=True)
    assert [each.value for each in scores.active] == [999], "what is saved names it"
    crashed = OomScores(Host("/"), scores.active)
    crashed.put_back_leftover()
    assert read(path) == 400
    scores.apply(saved=False)
    assert (read(path), scores.active) == (400, ())
    assert ["not raised" in note.message for note in scores.take_notes()] == [True]


@pytest.mark.real_cgroup
@needs_cgroup_v1
def test_a_dry_run_reports_what_it_would_raise(kubepods: Kubepods) -> None:
    path = start(kubepods, "one", 400)
    scores = OomScores(Host("/"))
    assert not scores.plan([target(kubepods, "one")], node_bytes=NODE, now=0.0, acts=False)
    [note] = scores.take_notes()
    assert (note.subject, note.message) == ("OOM scores shop/one", "would raise oom_score_adj from 400 to 999")
    assert (read(path), scores.active) == (400, ())


@pytest.mark.real_cgroup
@needs_cgroup_v1
def test_a_reload_to_a_dry_run_puts_back(kubepods: Kubepods) -> None:
    path = start(kubepods, "one", 400)
    scores = OomScores(Host("/"))
    raise_scores(scores, target(kubepods, "one"))
    scores.plan([target(kubepods, "one")], node_bytes=NODE, now=REFRESH_S, acts=False)
    assert (read(path), scores.active) == (400, ())


@pytest.mark.real_cgroup
@needs_cgroup_v1
def test_later_pods_are_raised_only_so_far_that_the_first_one_dies_first(kubepods: Kubepods) -> None:
    first, large = start(kubepods, "first", 100), start(kubepods, "large", 100, mib=100)
    node = 400 * MIB
    raise_scores(OomScores(Host("/")), target(kubepods, "first"), target(kubepods, "large"), node_bytes=node)
    assert read(first) == 999
    assert 700 < read(large) < 800, "a quarter of the node is 250 thousandths"


@pytest.mark.real_cgroup
@needs_cgroup_v1
def test_a_lower_score_than_the_kubelets_is_never_written(kubepods: Kubepods) -> None:
    start(kubepods, "first", 100)
    large = start(kubepods, "large", 900, mib=100)
    scores = OomScores(Host("/"))
    raise_scores(scores, target(kubepods, "first"), target(kubepods, "large"), node_bytes=400 * MIB)
    assert read(large) == 900
    raise_scores(scores, now=1.0)
    assert read(large) == 900


FORKS: Final = """
import os, sys
for line in sys.stdin:
    if os.fork() == 0:
        sys.stdin.read()
    print("ate", flush=True)
"""


@pytest.mark.real_cgroup
@needs_cgroup_v1
def test_a_child_that_was_forked_after_the_raise_is_put_back_also_when_its_parent_is_gone(kubepods: Kubepods) -> None:
    process = subprocess.Popen([sys.executable, "-c", FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    kubepods.adopt("one", process, qos="burstable")
    Path(f"/proc/{process.pid}/oom_score_adj").write_text("400")
    scores = OomScores(Host("/"))
    raise_scores(scores, target(kubepods, "one"))
    kubepods.eat("one", 1)
    root = Path("/sys/fs/cgroup/memory") / kubepods.root / "kubepods" / "burstable" / "podone"
    [procs] = root.glob("*/cgroup.procs")
    [child] = set(procs.read_text().split()) - {str(process.pid)}
    path = Path(f"/proc/{child}/oom_score_adj")
    assert read(path) == 999
    process.kill()
    process.wait(60)
    raise_scores(scores)
    assert (read(path), scores.active) == (400, ())


@pytest.mark.real_cgroup
@needs_cgroup_v1
def test_a_container_that_starts_later_is_raised_too_and_what_others_changed_is_left_alone(kubepods: Kubepods) -> None:
    one = start(kubepods, "one", 400)
    scores = OomScores(Host("/"))
    raise_scores(scores, target(kubepods, "one"))
    late = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, text=True)
    kubepods.adopt("late", late, qos="burstable")
    place = Path("/sys/fs/cgroup/memory") / kubepods.root / "kubepods" / "burstable" / "podone"
    [procs] = place.glob("*/cgroup.procs")
    procs.write_text(str(late.pid))
    path = Path(f"/proc/{late.pid}/oom_score_adj")
    path.write_text("350")
    raise_scores(scores, target(kubepods, "one"), now=REFRESH_S / 2)
    assert read(path) == 350, "the scan is not due"
    raise_scores(scores, target(kubepods, "one"), now=REFRESH_S)
    assert read(path) == 999
    one.write_text("800")
    raise_scores(scores, now=3.0)
    assert (read(one), read(path), scores.active) == (800, 350, ())


@pytest.mark.real_cgroup
@needs_cgroup_v1
def test_a_process_that_had_the_highest_score_by_itself_keeps_it(kubepods: Kubepods) -> None:
    path = start(kubepods, "one", 999)
    late = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, text=True)
    kubepods.adopt("late", late, qos="burstable")
    place = Path("/sys/fs/cgroup/memory") / kubepods.root / "kubepods" / "burstable" / "podone"
    [procs] = place.glob("*/cgroup.procs")
    procs.write_text(str(late.pid))
    low = Path(f"/proc/{late.pid}/oom_score_adj")
    low.write_text("350")
    scores = OomScores(Host("/"))
    raise_scores(scores, target(kubepods, "one"))
    assert read(low) == 999
    raise_scores(scores, now=1.0)
    assert (read(path), read(low)) == (999, 350)


# --- what a kernel refuses -------------------------------------------------------------------------------------------


@pytest.mark.real_cgroup
@needs_cgroup_v1
@root_only
def test_a_read_only_proc_of_the_host_beside_a_writable_one_of_the_same_processes(
    kubepods: Kubepods, tmp_path: Path
) -> None:
    """As in the DaemonSet, with hostPID."""
    path = start(kubepods, "one", 400)
    groups, proc = tmp_path / "sys/fs/cgroup/memory", tmp_path / "proc"
    with mounted(groups, "--bind", "/sys/fs/cgroup/memory"), mounted(proc, "--bind", "/proc"):
        subprocess.run(["mount", "-o", "remount,ro,bind", proc], check=True)
        scores = OomScores(Host(str(tmp_path)))
        raise_scores(scores, target(kubepods, "one"))
        assert (read(path), scores.take_notes()[0].message) == (999, "raised oom_score_adj from 400 to 999")
        raise_scores(scores)
        assert read(path) == 400


AS_A_USER: Final = """
import sys
from nodeagent.actuators.oom_scores import OomScores
from nodeagent.model import QOSClass
from nodeagent.policy.oom_preference import OomTarget
from nodeagent.sampling.hostfs.host import Host
scores = OomScores(Host("/"))
target = OomTarget("shop/one", "one", sys.argv[1], QOSClass.BURSTABLE)
for now in (0.0, 1.0, {retry}):
    if scores.plan([target], node_bytes=1 << 40, now=now, acts=True):
        scores.apply(saved=True)
        print(len(scores.active), *[note.message for note in scores.take_notes()])
"""


@pytest.mark.real_cgroup
@needs_cgroup_v1
def test_without_the_capability_it_is_one_note_with_the_remedy_and_a_later_try(kubepods: Kubepods) -> None:
    path = start(kubepods, "one", 400)
    cgroup = target(kubepods, "one").cgroup
    script = AS_A_USER.format(retry=RETRY_S)
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv")
    as_a_user = ["setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=-all"]
    done = subprocess.run(
        [*as_a_user, sys.executable, "-c", script, cgroup], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    refused = (
        "0 oom_score_adj cannot be written: Permission denied (CAP_DAC_OVERRIDE is missing: "
        "docs/escalation.md#the-order-of-the-oom-killer)"
    )
    assert done.stdout.splitlines() == [refused, refused]
    assert read(path) == 400


@pytest.mark.parametrize(
    ("qos", "score", "after"),
    [
        (QOSClass.BURSTABLE, 2, 999),
        (QOSClass.BURSTABLE, 998, 999),
        (QOSClass.BURSTABLE, 999, 999),
        (QOSClass.BURSTABLE, -998, -998),
        (QOSClass.BURSTABLE, -997, -997),
        (QOSClass.BURSTABLE, 0, 0),
        (QOSClass.BURSTABLE, 1000, 1000),
        (QOSClass.BEST_EFFORT, 1000, 1000),
        (QOSClass.BEST_EFFORT, 500, 500),
        (QOSClass.GUARANTEED, -997, -997),
        (QOSClass.GUARANTEED, 500, 500),
    ],
)
def test_no_score_leaves_the_class_of_its_pod(tmp_path: Path, qos: QOSClass, score: int, after: int) -> None:
    """Plain files, because a negative score needs CAP_SYS_RESOURCE."""
    container, process = tmp_path / "sys/fs/cgroup/kubepods/podu/c", tmp_path / "proc/7"
    container.mkdir(parents=True)
    process.mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").write_text("memory pids\n")
    (container / "cgroup.procs").write_text("7\n")
    (process / "stat").write_text(f"7 (a) b) S {' '.join(map(str, range(4, 53)))}\n")
    (process / "oom_score_adj").write_text(str(score))
    scores = OomScores(Host(str(tmp_path)))
    raise_scores(scores, OomTarget("shop/one", "u", "/kubepods/podu", qos))
    assert (read(process / "oom_score_adj"), scores.pods) == (after, int(score != after))


def test_records_of_processes_that_have_ended_are_dropped(tmp_path: Path) -> None:
    gone = RaisedScore("u", "/kubepods/podu", "c", 2**22, 1, 400, 999)
    scores = OomScores(Host(str(tmp_path)), [gone])
    scores.put_back_leftover()
    assert scores.active == ()
