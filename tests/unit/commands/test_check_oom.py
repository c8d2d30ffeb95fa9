"""`check` shows the OOM kills since the start of each pod and service, by the kernel's counters."""

import json
from pathlib import Path

import pytest

from nodeagent.commands import cli
from nodeagent.model import OomCause, OomKill, OomLevel, OomPlace
from nodeagent.report import json_document, sections, text
from tests.support import reports, schemas
from tests.support.trees import Node, TreePod, write_node

POD = TreePod("shop/web-1")


@pytest.fixture
def node(tmp_path: Path) -> Path:
    write_node(tmp_path, Node(pods=(POD, TreePod("shop/other"))))
    return tmp_path


def count(node: Path, *, vmstat: int, ooms: int, kills: int) -> None:
    """The pod's only container has these counts, and so have its parents."""
    (node / "proc/vmstat").write_text(f"nr_free_pages 1\noom_kill {vmstat}\n")
    top = node / "sys/fs/cgroup"
    [pod] = top.rglob(f"*{POD.cgroup_uid.replace('-', '_')}.slice")
    container = max((path for path in pod.iterdir() if path.is_dir()), key=lambda path: path.name)
    for path in (container, *container.parents):
        if path == top:
            break
        (path / "memory.events").write_text(f"low 0\noom {ooms}\noom_kill {kills}\noom_group_kill 0\n")
        own = (ooms, kills) if path == container else (0, 0)
        (path / "memory.events.local").write_text(f"oom {own[0]}\noom_kill {own[1]}\n")


def checked(node: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert cli.main(["check", "--host-root", str(node), "--no-api", *more]) in (0, 1, 2, 3)
    return capsys.readouterr().out


def test_kills_by_an_own_limit_are_a_row(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count(node, vmstat=2, ooms=1, kills=2)
    shown = checked(node, capsys)
    assert "OOM KILLS SINCE THE START OF EACH POD OR SERVICE" in shown
    [row] = [line for line in shown.splitlines() if "container-limit" in line]
    assert row.split()[0] == "shop/web-1"
    assert " 2 " in row
    [found] = json.loads(checked(node, capsys, "-o", "json"))["oomKills"]
    assert (found["pod"], found["processes"], found["cause"]) == ("shop/web-1", 2, "container-limit")


def test_a_node_without_a_kill_since_its_boot_reads_no_cgroup(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    count(node, vmstat=0, ooms=5, kills=5)
    assert "OOM KILLS" not in checked(node, capsys)
    assert json.loads(checked(node, capsys, "-o", "json"))["oomKills"] == []


def test_the_document_of_a_kill_is_valid_and_its_text_is_escaped() -> None:
    place = OomPlace("/system.slice/\x1b[31m", OomLevel.HOST)
    kills = (OomKill(3, OomCause.HOST_LIMIT, place), OomKill(1, OomCause.UNKNOWN, None))
    made = reports.report()._replace(oom_kills=kills)
    document = json.loads(json.dumps(json_document.to_json(made)))
    assert list(schemas.strict().iter_errors(document)) == []
    assert "\x1b" not in text.render(sections.sections(made))
