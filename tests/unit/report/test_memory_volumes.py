"""Memory-backed emptyDirs in `check`: named by pod and volume."""

import json

from nodeagent.model import EmptyDir, MemoryVolume
from nodeagent.report import text
from nodeagent.report.json_document import to_json
from nodeagent.report.node_report import Report
from nodeagent.report.sections import sections
from tests.support import reports, schemas

MIB = 1 << 20


def report() -> Report:
    view = reports.pod_view("web", working_set=5 * MIB)
    view = view._replace(pod=view.pod._replace(empty_dirs=(EmptyDir("cache", True, 64 * MIB),)))
    made = reports.report(pods=(reports.ranked(view, 1),))
    volumes = (
        MemoryVolume(view.pod.uid, "cache", 48 * MIB),
        MemoryVolume("other", "sc\x1bratch", 8 * MIB),
        MemoryVolume("other", "empty", 0),
        MemoryVolume("other", "hidden", None),
    )
    return made._replace(snapshot=made.snapshot._replace(pods=(view,)), memory_volumes=volumes)


def test_volumes_are_named_with_what_they_hold_and_their_limit() -> None:
    printed = text.render(sections(report()))
    key = reports.pod_view("web", working_set=5 * MIB).pod.key
    [line] = [line for line in printed.splitlines() if " cache " in line]
    assert line.split() == [key, "cache", "48Mi", "64Mi"]
    assert "uid/other" in printed
    assert "empty" not in printed.split("VOLUME IN MEMORY")[1].split("\n\n")[0]
    assert "\x1b" not in printed


def test_the_document_has_the_volumes() -> None:
    document = json.loads(json.dumps(to_json(report())))
    assert list(schemas.strict().iter_errors(document)) == []
    assert [(each["volume"], each["usedBytes"], each["sizeLimitBytes"]) for each in document["memoryVolumes"]] == [
        ("cache", 48 * MIB, 64 * MIB),
        ("sc\x1bratch", 8 * MIB, None),
        ("hidden", None, None),
    ]
