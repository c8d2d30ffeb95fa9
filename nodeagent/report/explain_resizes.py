"""`nodeagent explain`: the resizes that a decision ordered (`ownLimit.resize`), what came of each, and why others were
not ordered."""

from nodeagent.model import GOOD_RESIZES
from nodeagent.report import record_fields, wording
from nodeagent.report.cells import GOOD, WARN, Cell, Section
from nodeagent.report.recorded_decisions import RecordedDecision


def headline(recorded: RecordedDecision) -> Cell | None:
    """The pods that were to be resized; None if the decision ordered none."""
    pods = [wording.escape_terminal(record_fields.pod_name(each)) for each in _orders(recorded)]
    more = f" and {len(pods) - 2} more" if len(pods) > 2 else ""
    return Cell(f"resize {', '.join(pods[:2])}{more}", WARN) if pods else None


def section(recorded: RecordedDecision) -> Section:
    """Each order with its reason, then why others were not made, the answers of the API server and what the kubelet has
    made of them."""
    lines = [
        Cell(wording.escape_terminal(f"{record_fields.pod_name(order)}: {order.get('message')}"))
        for order in _orders(recorded)
    ]
    lines += [
        Cell(wording.escape_terminal(f"{code}: {message}"), WARN)
        for code, message in record_fields.resize_refusals(recorded.decision)
    ]
    for each in recorded.resizes:
        result, message = str(each.get("result")), str(each.get("message") or "")
        text = f"{record_fields.pod_name(each)}, container {each.get('container')}: {result}"
        text += f": {message}" if message else ""
        lines.append(Cell(wording.escape_terminal(text), GOOD if result in GOOD_RESIZES else WARN))
    return Section("RESIZES" if lines else "", lines=tuple(lines))


def _orders(recorded: RecordedDecision) -> list[record_fields.JsonObject]:
    return list(record_fields.items(recorded.decision, "resizes"))
