"""The values of `nodeagent demo`: one recorded incident, twice, and the sections of its end.

Times are seconds since the pod began to grow. `analysis.incident` makes these values: those of the lane `alone` are
recorded, the acts of the lane `beside` are decisions of the policy on the recorded samples.
"""

from typing import Any, Final, NamedTuple

from nodeagent.config.schema import API_VERSION
from nodeagent.model import units
from nodeagent.report.cells import BAD, DIM, GOOD, STRONG, Cell, Column, Section

ALONE: Final = "kubelet alone"
BESIDE: Final = "with nodeagent"
NEXT: Final = (
    ("nodeagent check", "report this machine; changes nothing"),
    ("nodeagent run --dry-run", "decide and log on this machine; changes nothing"),
)
"""The next commands to try."""


class Moment(NamedTuple):
    """Something that happened."""

    at: float
    who: str
    text: str
    style: str = ""


class Point(NamedTuple):
    """Memory at one time."""

    at: float
    available: int
    """Bytes of MemAvailable."""


class Standing(NamedTuple):
    """A pod in the eviction order."""

    rank: int
    pod: str
    qos: str
    usage: int | None
    request: int | None
    why: str
    """Its keys, or why it is protected."""
    victim: bool = False


class Lane(NamedTuple):
    """One run of the incident."""

    name: str
    began_wall: float
    """Epoch seconds of time 0."""
    curve: tuple[Point, ...]
    moments: tuple[Moment, ...]
    outlook: tuple[Moment, ...] = ()
    """The pod that would be evicted first, from then on; only where the policy ran."""
    crossed_at: float | None = None
    """Below the hard threshold of nodeagent."""
    noticed: str = ""
    """The first report of the shortage."""
    acted_at: float | None = None
    actor: str = ""
    ended: str = ""
    """How the pod ended."""
    reason: str = ""
    """What is known of why this pod."""
    style: str = ""
    """Of the act."""
    lowest: int = 0
    stall_s: float = 0.0
    """Time in which every process of the node that was not idle waited for memory."""

    @property
    def delay_s(self) -> float | None:
        """From the crossing to the act."""
        if self.acted_at is None or self.crossed_at is None:
            return None
        return self.acted_at - self.crossed_at


class Story(NamedTuple):
    """The incident."""

    pod: str
    request: int
    growth: int
    """Bytes a second."""
    capacity: int
    machine: str
    recorded: str
    """The day."""
    hard: int
    soft: int
    kubelet: int
    """Thresholds in bytes; the last one is the kubelet's."""
    every_s: float
    """Between two samples of the kubelet."""
    began: float
    ended: float
    alone: Lane
    beside: Lane
    ranking: tuple[Standing, ...]
    deciding: str
    """The key that put the victim before the next pod."""

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        return self.alone, self.beside


def headline(story: Story) -> str:
    """What happens, in one sentence."""
    return (
        f"{story.pod} requested {_size(story.request)}, grows by {_size(story.growth)} a second, on a node of "
        f"{amount(story.capacity)}"
    )


def origin(story: Story) -> str:
    """Where it comes from."""
    return (
        f"Recorded on {story.recorded} in a virtual machine ({story.machine}). The kubelet is a program with its "
        f"eviction loop: a sample every {story.every_s:g} s, hard threshold {_size(story.kubelet)}. nodeagent's "
        "decisions are computed now by its policy on the recorded samples."
    )


def amount(value: int | None) -> str:
    """Bytes for people."""
    return units.format_amount(value)


def _size(value: int) -> str:
    """A configured amount: `64Mi`."""
    return units.format_quantity(value) if value % (1 << 20) == 0 else units.format_amount(value)


def seconds(at: float) -> str:
    """` 12.3 s`."""
    return f"{at:5.1f} s"


def moments(story: Story, *, until: float | None = None) -> list[tuple[Lane, Moment]]:
    """All moments of both lanes up to then, in their order."""
    found = [(lane, moment) for lane in story.lanes for moment in lane.moments]
    return sorted(
        (each for each in found if until is None or each[1].at <= until), key=lambda each: (each[1].at, each[0].name)
    )


# --- sections --------------------------------------------------------------------------------------------------------


def head(story: Story) -> Section:
    """What happens, and where it comes from."""
    return Section("", lines=(Cell(headline(story), STRONG), Cell(origin(story), DIM)))


def sections(story: Story) -> tuple[Section, ...]:
    """What happened, the order of the pods, both lanes side by side, and the next commands."""
    return (timeline(story), ranking(story), comparison(story), next_commands())


def timeline(story: Story) -> Section:
    """Every moment of both lanes."""
    rows = tuple(
        (Cell(seconds(moment.at)), Cell(lane.name), Cell(moment.who), Cell(moment.text, moment.style))
        for lane, moment in moments(story)
    )
    return Section("WHAT HAPPENED", (Column("TIME", right=True), Column("RUN"), Column("WHO"), Column("WHAT")), rows)


def ranking(story: Story) -> Section:
    """The eviction order of the decision."""
    columns = (
        Column("RANK", right=True),
        Column("POD"),
        Column("QOS"),
        Column("USAGE", right=True),
        Column("REQUEST", right=True),
        Column("WHY"),
    )
    rows = tuple(
        (
            Cell(str(each.rank)),
            Cell(each.pod, BAD if each.victim else ""),
            Cell(each.qos),
            Cell(amount(each.usage)),
            Cell("-" if each.request is None else amount(each.request)),
            Cell(each.why),
        )
        for each in story.ranking
    )
    lines = (Cell(f"Deciding key: {story.deciding}", STRONG),) if story.deciding else ()
    return Section("EVICTION ORDER OF NODEAGENT", columns, rows, lines)


def comparison(story: Story) -> Section:
    """Both lanes side by side."""
    columns = (Column(""), Column(ALONE.upper()), Column(BESIDE.upper()))
    rows = tuple((Cell(name, DIM), *values) for name, *values in _facts(story))
    return Section("OUTCOME", columns, rows)


def _facts(story: Story) -> list[tuple[str, Cell, Cell]]:
    alone, beside = story.lanes
    return [
        ("warned", Cell(alone.noticed, alone.style), Cell(beside.noticed, beside.style)),
        ("acted", Cell(_delay(story, alone), alone.style), Cell(_delay(story, beside), beside.style)),
        ("who", Cell(alone.actor, alone.style), Cell(beside.actor, beside.style)),
        ("ended", Cell(alone.ended), Cell(beside.ended)),
        ("why it", Cell(alone.reason), Cell(beside.reason)),
        ("lowest", _lowest(story, alone), _lowest(story, beside)),
        ("stalled", Cell(f"{alone.stall_s:.1f} s"), Cell(f"{beside.stall_s:.1f} s")),
    ]


def _delay(story: Story, lane: Lane) -> str:
    return "not" if lane.delay_s is None else f"{lane.delay_s:.1f} s after {_size(story.hard)}"


def _lowest(story: Story, lane: Lane) -> Cell:
    return Cell(f"{amount(lane.lowest)} available", GOOD if lane.lowest >= story.kubelet else BAD)


def next_commands() -> Section:
    """What to try next."""
    width = max(len(command) for command, _ in NEXT)
    lines = tuple(Cell(f"{command.ljust(width)}  {text}") for command, text in NEXT)
    return Section("NEXT", lines=lines)


# --- for programs ----------------------------------------------------------------------------------------------------


def to_json(story: Story) -> dict[str, Any]:
    """The same facts as one JSON object."""
    return {
        "apiVersion": API_VERSION,
        "kind": "DemoReport",
        "recorded": story.recorded,
        "machine": story.machine,
        "pod": story.pod,
        "requestBytes": story.request,
        "growthBytesPerSecond": story.growth,
        "capacityBytes": story.capacity,
        "thresholds": {"hard": story.hard, "soft": story.soft, "kubeletHard": story.kubelet},
        "decidingKey": story.deciding or None,
        "ranking": [each._asdict() for each in story.ranking],
        "lanes": [_lane_object(lane) for lane in story.lanes],
    }


def _lane_object(lane: Lane) -> dict[str, Any]:
    return {
        "name": lane.name,
        "crossedAtSeconds": lane.crossed_at,
        "actedAtSeconds": lane.acted_at,
        "actor": lane.actor,
        "ended": lane.ended,
        "reason": lane.reason,
        "firstWarning": lane.noticed,
        "lowestBytes": lane.lowest,
        "stallSeconds": lane.stall_s,
        "moments": [{"atSeconds": each.at, "who": each.who, "text": each.text} for each in lane.moments],
        "memory": [[point.at, point.available] for point in lane.curve],
    }
