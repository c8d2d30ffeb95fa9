import pytest

from nodeagent.commands import exit_codes
from nodeagent.config.kubelet import KubeletThresholds
from nodeagent.model import (
    Amount,
    DiskLayout,
    Note,
    NoteKind,
    PodSource,
    Refusal,
    RefusalCode,
    Signal,
    SignalState,
    Trend,
)
from nodeagent.policy.page_cache import Reclaimable
from nodeagent.report import node_report, text
from nodeagent.report.node_report import Report
from nodeagent.report.sections import sections
from tests.support import reports
from tests.support.reports import MIB


def printed(report: Report) -> str:
    return text.render(sections(report))


def row(output: str, start: str) -> str:
    found = [line for line in output.splitlines() if line.startswith(start)]
    assert len(found) == 1, output
    return found[0]


def test_the_first_line_has_the_state_as_of_a_monitoring_plugin() -> None:
    memory = reports.judged(reports.observations()[Signal.MEMORY], SignalState.OK, (reports.HARD_MEMORY, 200 * MIB))
    output = printed(reports.report(signals=(memory,)))
    assert output.splitlines()[0] == "OK node-1: every signal is above its thresholds"


def test_a_signal_that_the_node_does_not_have_is_not_said_to_be_above_its_thresholds() -> None:
    output = printed(reports.report())
    assert "unknown" in row(output, "allocatableMemory.available")
    assert output.splitlines()[0] == "OK node-1: every signal that this node has is above its thresholds"


def test_the_first_line_of_a_node_under_pressure_has_the_numbers_of_the_threshold() -> None:
    seen = reports.observations()[Signal.MEMORY]._replace(available=239 * MIB)
    signals = (
        reports.judged(seen, SignalState.HARD, (reports.HARD_MEMORY._replace(grace_period_s=0.0), 300 * MIB), met=True),
    )
    report = reports.report(signals=signals, observations={**reports.observations(), Signal.MEMORY: seen})
    assert printed(report).splitlines()[0] == "HARD node-1: memory.available 239Mi is below 300Mi (hard)"
    assert exit_codes.exit_code_of(node_report.state(report)) == 2


def test_a_signal_that_is_left_to_the_kubelet_is_below_its_threshold_and_says_why() -> None:
    seen = reports.observations()
    left = reports.judged(
        seen[Signal.NODEFS], SignalState.OK, (reports.HARD_NODEFS, 1 << 60), not_due_reason="it stays"
    )
    thresholds = tuple([each._replace(not_due_code=RefusalCode.STABLE_DISK) for each in left.thresholds])
    output = printed(reports.report(signals=(left._replace(thresholds=thresholds),)))
    assert output.splitlines()[0] == (
        "OK node-1: no threshold counts as met; below one, and left to the kubelet: nodefs.available"
    )
    assert "it stays" in row(output, "nodefs.available")


def test_a_signal_shows_its_nearest_threshold_first_and_the_others_below() -> None:
    lines = printed(reports.report()).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("memory.available"))
    assert "soft for 30s 300Mi" in lines[at]
    assert "+1.71Gi" in lines[at]
    assert "hard 200Mi" in lines[at + 1]


def test_an_unknown_signal_has_its_reason() -> None:
    line = row(printed(reports.report()), "allocatableMemory.available")
    assert "unknown" in line
    assert "no kubepods cgroup" in line


def test_signals_on_one_file_system_are_marked() -> None:
    assert "same file system as nodefs" in row(printed(reports.report()), "imagefs.available")


def test_a_falling_signal_has_the_predicted_times_of_threshold_and_exhaustion() -> None:
    verdicts = {each.signal: each for each in reports.report().plan.signals}

    def remark(trend: Trend | None) -> str:
        moved = {**verdicts, Signal.MEMORY: verdicts[Signal.MEMORY]._replace(trend=trend)}
        return row(printed(reports.report(signals=tuple(moved.values()))), "memory.available")

    assert "threshold in 40s, exhausted in 1m 5s (confidence 93%); " in remark(Trend(-1e6, 40.0, 65.0, 0.93))
    assert "  exhausted in 4s (confidence 100%); " in remark(Trend(-1e6, None, 4.0, 1.0))
    for calm in (None, Trend(0.0, None, None, 1.0)):
        assert "confidence" not in remark(calm)


def test_a_percentage_is_shown_with_what_it_amounts_to() -> None:
    assert "hard 12% = 2.4Gi" in row(printed(reports.report()), "nodefs.available")


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (Reclaimable(1229 * MIB, 3), "page cache that reclaim may drop: 1.2Gi in 3 pods"),
        (Reclaimable(64 * MIB, 1), "page cache that reclaim may drop: 64Mi in 1 pod"),
        (
            Reclaimable(64 * MIB, 1, "cgroups are mounted read-only"),
            "page cache that reclaim may drop: 64Mi in 1 pod; not reclaimed: cgroups are mounted read-only",
        ),
        (Reclaimable(0, 0, "no \x1b"), "page cache that reclaim may drop: none; not reclaimed: no \\x1b"),
    ],
)
def test_page_cache_that_reclaim_may_drop_is_one_line_with_the_reason_if_it_is_not_possible(
    found: Reclaimable, line: str
) -> None:
    assert row(printed(reports.report()._replace(page_cache=found)), "page cache") == line


def test_without_page_cache_to_reclaim_there_is_no_line() -> None:
    assert "page cache that" not in printed(reports.report())


def test_a_machine_without_pods_still_has_a_report_of_the_node() -> None:
    output = printed(reports.report())
    assert "No pods on this machine." in output
    assert "memavailable (the kernel's)" in output


def test_candidates_show_their_keys_and_protected_pods_their_reasons() -> None:
    output = printed(
        reports.report(
            pods=(
                reports.ranked(reports.pod_view("web", working_set=5 * MIB, estimate=64 * MIB), 1),
                reports.ranked(
                    reports.pod_view("db", working_set=7 * MIB),
                    2,
                    refusals=(Refusal(RefusalCode.BARE_POD, "no controller owns it"),),
                ),
            )
        )
    )
    web = next(line for line in output.splitlines() if "default/web" in line)
    assert "uses 212Mi over its request" in web
    assert "~64Mi" in web
    assert "protected: no controller owns it" in next(line for line in output.splitlines() if "default/db" in line)
    assert "requests marked ~ estimated from oom_score_adj" in output
    assert "(1 candidate, 1 protected)" in output


def test_a_candidate_that_a_limit_excludes_is_not_called_protected() -> None:
    small = Refusal(RefusalCode.BELOW_MINIMUM_RELIEF, "relief below 1.2Mi, the minimum for a deficit of 120Mi")
    bare = Refusal(RefusalCode.BARE_POD, "no controller owns it")
    rows = (
        reports.ranked(reports.pod_view("web", working_set=MIB), 1, refusals=(small,)),
        reports.ranked(reports.pod_view("db", working_set=MIB), 2, refusals=(small, bare)),
    )
    output = printed(reports.report(pods=rows))
    assert "(0 candidates, 1 protected, 1 not evicted now)" in output
    web, db = (next(line for line in output.splitlines() if f"default/{name}" in line) for name in ("web", "db"))
    assert "  not evicted now: relief below 1.2Mi" in web
    assert "  protected: relief below 1.2Mi, the minimum for a deficit of 120Mi; no controller owns it" in db


def test_requests_from_the_api_are_not_marked_as_estimates() -> None:
    view = reports.pod_view("web", working_set=5 * MIB, source=PodSource.API, estimate=64 * MIB)
    output = printed(reports.report(pods=(reports.ranked(view, 1),)))
    assert "~" not in output
    assert "estimated" not in output


def test_a_kubelet_that_acts_first_is_named() -> None:
    output = printed(
        reports.report(kubelet=KubeletThresholds("/etc/k.yaml", (reports.SOFT_MEMORY._replace(grace_period_s=0),)))
    )
    line = output[output.index("KUBELET (/etc/k.yaml)") :].splitlines()[2]
    assert line.split("  ")[-1] == "kubelet first"


def test_a_soft_threshold_that_is_met_before_the_kubelets_is_shown_with_its_grace() -> None:
    between = reports.HARD_MEMORY._replace(value=Amount(250 * MIB, None, "250Mi"))
    output = printed(reports.report(kubelet=KubeletThresholds("/etc/k.yaml", (between, reports.HARD_MEMORY))))
    first, second = [line.split("  ") for line in output[output.index("KUBELET (") :].splitlines()[2:4]]
    assert [part for part in first if part][1:] == [
        "hard 250Mi",
        "soft for 30s 300Mi; hard 200Mi",
        "soft first, if it falls for more than 30s; else kubelet first",
    ]
    assert second[-1] == "soft first, if it falls for more than 30s; else same level"


def test_a_kubelet_with_an_unreadable_configuration_is_reported_as_unknown() -> None:
    view = KubeletThresholds("command line", (reports.HARD_MEMORY,), "/etc/k.yaml: Permission denied")
    output = printed(reports.report(kubelet=view))
    assert "KUBELET (command line, not known, defaults assumed)" in output
    assert (
        "Not known, defaults assumed: whether and when the kubelet evicts (/etc/k.yaml: Permission denied)." in output
    )


def test_without_the_api_the_header_and_each_row_report_that_no_pod_is_evicted() -> None:
    unlisted = Refusal(RefusalCode.UNKNOWN_POD, "the API server does not list this pod")
    bare = Refusal(RefusalCode.BARE_POD, "no controller owns it")
    rows = (
        reports.ranked(reports.pod_view("web", working_set=MIB), 1, refusals=(unlisted,)),
        reports.ranked(reports.pod_view("db", working_set=MIB), 2, refusals=(unlisted, bare)),
    )
    output = printed(reports.report(pods=rows))
    assert "(0 candidates, 1 protected, 1 not evicted: not listed by the API server)" in output
    web, db = (next(line for line in output.splitlines() if f"default/{name}" in line) for name in ("web", "db"))
    assert "  not evicted: not listed by the API server; " in web
    assert "  protected: no controller owns it" in db


def test_names_from_tenants_cannot_move_the_cursor_or_forge_a_line() -> None:
    view = reports.pod_view("web", working_set=1)
    view = view._replace(pod=view.pod._replace(name="\x1b[2J\r\nOK node-1: fine"))
    output = printed(
        reports.report(pods=(reports.ranked(view, 1),), notes=(Note(NoteKind.POD, "y\x1b]0;t\x07", about="x\x07"),))
    )
    assert all(line.isprintable() for line in output.splitlines())
    assert sum(line.startswith("OK node-1") for line in output.splitlines()) == 1


def test_columns_are_aligned_and_no_line_ends_in_a_blank() -> None:
    lines = printed(reports.report()).splitlines()
    start = lines.index("SIGNALS")
    header = lines[start + 1]
    state = header.index("STATE")
    assert all(line[state - 2 : state] == "  " for line in lines[start + 1 : start + 12] if len(line) > state)
    assert all(line == line.rstrip() for line in lines)


def test_hard_outranks_soft_outranks_unknown_outranks_ok() -> None:
    seen = reports.observations()
    order = [SignalState.OK, SignalState.UNKNOWN, SignalState.SOFT, SignalState.HARD]
    signals = [Signal.PID, Signal.NODEFS, Signal.IMAGEFS, Signal.MEMORY]
    for worst in range(len(order)):
        verdicts = tuple(
            reports.judged(seen[signal], state, (reports.HARD_NODEFS._replace(signal=signal), 1))
            for signal, state in list(zip(signals, order, strict=True))[: worst + 1]
        )
        assert node_report.state(reports.report(signals=verdicts)) is order[worst]


def test_an_unknown_signal_without_a_threshold_or_implied_by_another_does_not_make_the_node_unknown() -> None:
    seen = reports.observations()
    unread = reports.judged(seen[Signal.ALLOCATABLE_MEMORY], SignalState.UNKNOWN, (reports.HARD_ALLOCATABLE, None))
    memory = reports.judged(seen[Signal.MEMORY], SignalState.OK, (reports.HARD_MEMORY, 1))
    without = reports.judged(seen[Signal.PID], SignalState.UNKNOWN)
    assert node_report.state(reports.report(signals=(memory, unread, without))) is SignalState.OK
    blind = memory._replace(state=SignalState.UNKNOWN)
    assert node_report.state(reports.report(signals=(blind, unread))) is SignalState.UNKNOWN


def test_a_machine_without_runtime_and_pods_does_not_miss_its_image_file_system() -> None:
    seen = reports.observations()[Signal.IMAGEFS]._replace(available=None, capacity=None, reason="no container runtime")
    threshold = reports.HARD_NODEFS._replace(signal=Signal.IMAGEFS)
    verdict = reports.judged(seen, SignalState.UNKNOWN, (threshold, None))
    pods = (reports.ranked(reports.pod_view("web", working_set=1), 1),)
    assert node_report.state(reports.report(signals=(verdict,))) is SignalState.OK
    assert node_report.state(reports.report(signals=(verdict,), pods=pods)) is SignalState.UNKNOWN
    known = reports.report(signals=(verdict,), layout=DiskLayout.DEDICATED_IMAGEFS)
    assert node_report.state(known) is SignalState.UNKNOWN
    assert printed(known).startswith("UNKNOWN node-1: imagefs.available is unknown (no container runtime)")
    inodes = seen._replace(signal=Signal.IMAGEFS_INODES)
    other = reports.judged(inodes, SignalState.UNKNOWN, (threshold._replace(signal=Signal.IMAGEFS_INODES), None))
    both = reports.report(signals=(verdict, other), layout=DiskLayout.DEDICATED_IMAGEFS)
    cause = "imagefs.available and imagefs.inodesFree are unknown (no container runtime)"
    assert printed(both).splitlines()[0] == f"UNKNOWN node-1: {cause}"
