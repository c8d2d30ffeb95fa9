import re

from nodeagent.model import Signal, SignalState
from nodeagent.report import check_page, history, sections
from tests.support import nodes, recordings, reports
from tests.support.nodes import GI
from tests.support.reports import MIB


def captions(blocks: tuple[str, ...]) -> list[str]:
    return re.findall("<figcaption>([^<]*)", "".join(blocks))


def test_the_page_begins_with_the_verdict_and_contains_every_section_of_the_text() -> None:
    pod = reports.ranked(reports.pod_view("hog", working_set=212 * MIB), 1)
    report = reports.report(pods=(pod,))
    blocks = check_page.blocks(report)
    assert blocks[0].startswith('<p class="verdict good">OK node-1')
    page = "".join(blocks)
    for section in sections.sections(report):
        assert section.title in page
    assert "BEFORE THE NEXT BY" in page


def test_a_signal_under_pressure_is_red_and_has_its_thresholds() -> None:
    seen = reports.observations()[Signal.MEMORY]._replace(available=150 * MIB)
    verdict = reports.judged(seen, SignalState.HARD, (reports.HARD_MEMORY, 200 * MIB), met=True)
    report = reports.report(signals=(verdict,), observations={**reports.observations(), Signal.MEMORY: seen})
    levels = check_page.levels(report)
    assert '<rect class="fill bad"' in levels
    assert "150Mi of 4Gi" in levels
    assert "hard 200Mi" in levels


def test_one_file_system_has_one_bar() -> None:
    assert check_page.levels(reports.report()).count("nodefs.available") == 1
    assert "imagefs" not in check_page.levels(reports.report())


def test_memory_is_shared_among_pods_and_the_rest_of_the_node() -> None:
    pods = tuple(reports.ranked(reports.pod_view(f"p{each}", working_set=100 * MIB), each) for each in range(1, 11))
    shares = check_page.memory_shares(reports.report(pods=pods))
    assert shares is not None
    assert "2 other pods and outside the pods" in shares
    assert shares.count("<li>") == 9


def test_a_node_of_unknown_memory_has_no_picture_of_it() -> None:
    unknown = reports.observation(Signal.MEMORY, None, None, reason="not readable")
    assert (
        check_page.memory_shares(reports.report(observations={**reports.observations(), Signal.MEMORY: unknown}))
        is None
    )


def test_a_history_is_charted_between_the_levels_and_the_order() -> None:
    samples = recordings.record(
        lambda second: nodes.snapshot(nodes.view("web", GI), at=nodes.NOW + second), nodes.config(), seconds=30
    )
    blocks = check_page.blocks(reports.report(), history=history.history(samples))
    assert captions(blocks) == [
        "Available, against the thresholds",
        "memory.available",
        "Memory of the pods",
        "Memory of the node now",
    ]
