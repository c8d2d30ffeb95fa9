"""The page of a whole recording: its history, what it is made of, and its decisions. For `snapshot --html`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nodeagent.model import RecordedSample, RecordingHeader
from nodeagent.report import explain, history, history_page, html_page, recorded_decisions, wording
from nodeagent.report.cells import WARN
from nodeagent.report.html_page import Html


def blocks(
    headers: Sequence[RecordingHeader],
    samples: Iterable[RecordedSample],
    records: Sequence[dict[str, Any]],
    *,
    facts: Mapping[str, str],
    trouble: Sequence[str] = (),
) -> tuple[Html, ...]:
    """Facts, charts, the list of decisions, and the recorded configuration. `facts`: further ones, by name."""
    found = history.history(samples)
    header = headers[-1] if headers else None
    pairs = dict(facts)
    if header is not None:
        pairs |= {"Node": header.node, "Recorded by": f"nodeagent {header.version}", "Kernel": header.kernel}
    if found.began is not None and found.ended is not None:
        pairs |= {"From (UTC)": wording.rfc3339(found.began), "To (UTC)": wording.rfc3339(found.ended)}
    pairs["Samples"] = str(found.samples)
    parts = [html_page.facts((name, value) for name, value in pairs.items() if value)]

    evictions, kills = history.evictions(records), history.oom_kills(records)
    parts.extend(history_page.blocks(found, evictions=evictions, oom_kills=kills))
    listed = recorded_decisions.group(iter(records))
    parts.append(html_page.section(explain.list_section(listed)._replace(title="DECISIONS")))
    if header is not None and header.configuration:
        parts.append(html_page.details("The configuration", html_page.preformatted(header.configuration)))
    parts.extend(html_page.paragraph(f"not readable: {each}", WARN) for each in trouble)
    return tuple(parts)
