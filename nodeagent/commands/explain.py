"""`nodeagent explain`: recorded decisions as a list, as a story, for one pod, for the owner of a pod, or as Markdown.

The source is a state directory, a file of records, or a recording: a recorder's directory or a snapshot file. Without
samples the tables are printed as ever, and one line states that and why there are no curves.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nodeagent.commands import html_file, printing, standard_streams
from nodeagent.commands.arguments_common import Since
from nodeagent.model.recording import header_at
from nodeagent.records import flight_recorder, recorder_paths, recording
from nodeagent.records.recording import Recording, RecordingError
from nodeagent.report import (
    explain,
    explain_page,
    explain_pod,
    html_page,
    owner_view,
    post_mortem,
    record_fields,
    recorded_decisions,
    stories,
    story_text,
)
from nodeagent.report.recorded_decisions import ExplainError, RecordedDecision
from nodeagent.report.stories import Story

if TYPE_CHECKING:
    from nodeagent.config.schema import Config

MAX_VIEWS: Final = 5
"""Victims of a post-mortem whose request is searched for; a search takes 15 decisions."""


class ExplainOptions(NamedTuple):
    """What to explain, and how."""

    id: str | None = None
    """None: the list, or with `pod` all of the pod."""
    last: int = 20
    pod: str | None = None
    owner: bool = False
    markdown: bool = False
    since: Since | None = None
    output: str = "text"
    color: str = "auto"
    html: str | None = None
    """Also write a page to this file, or only a page to `-`."""


class Source(NamedTuple):
    """Where decisions and samples come from."""

    place: Path
    decisions: Sequence[RecordedDecision]
    recording: Recording | None
    """None: there are no samples."""
    missing: str
    """Why there are no samples; empty if there are."""
    end: float
    """The time from which `--since` counts back."""

    def configuration(self, recorded: RecordedDecision) -> str:
        """The configuration in force at this decision as YAML; empty: not recorded."""
        headers = () if self.recording is None else self.recording.headers
        instance = recorded.id.rpartition("-")[0]
        header = header_at([each for each in headers if each.instance == instance], _wall(recorded))
        return header.configuration if header is not None else ""


def open_source(place: Path, *, now: float, samples_at: Path | None = None) -> Source:
    """Read the decisions of a state directory, a file of records, a recorder's directory or a snapshot file.

    `samples_at`: the recorder's directory if it is not below the state directory.

    Raises:
        ExplainError: it does not exist, cannot be read, or is none of these.
    """
    try:
        found: Recording | None = recording.open_recording(samples_at or place)
        missing = ""
    except RecordingError as error:
        found, missing = None, str(error)
    # A named pipe in place of a file of records exists too: reading it reports what it is.
    records = [place / name for name in (flight_recorder.DECISIONS_FILE, flight_recorder.OLDER_FILE)]
    if found is not None and samples_at is None and not any(each.exists() for each in records):
        decisions = recorded_decisions.group(found.records())
    elif found is None and place.suffix in (".zip", recorder_paths.SUFFIX):
        raise ExplainError(missing)
    else:
        decisions = recorded_decisions.read_decisions(place)
    if found is not None and found.span is None:
        missing = f"{samples_at or place} has no samples"
    return Source(place, decisions, found, missing, _end(place, found, decisions, now=now))


def _end(place: Path, found: Recording | None, decisions: Sequence[RecordedDecision], *, now: float) -> float:
    """The present for a directory, which an agent may be writing; for a file the end of what it has."""
    if place.is_dir():
        return now
    times = [wall for each in decisions if (wall := _wall(each)) is not None]
    if found is not None and found.span is not None:
        times.append(found.span.last)
    return max(times, default=now)


def show(source: Source, options: ExplainOptions, *, config: "Config | None") -> None:
    """Print what is asked for. `config`: the configuration that was given, for decisions without their own.

    Raises ExplainError, OutputError.
    """
    if options.id is not None and not source.decisions:
        has = "no decision" if source.missing else "samples and no decision: `nodeagent replay` reads it"
        raise ExplainError(f"{source.place}: has {has}")
    decisions = _recent(source, options.since)
    if options.owner and options.pod is not None:
        _show_owner(source, decisions, options, config)
    elif options.pod is not None:
        entries = explain_pod.entries(decisions, options.pod)
        section = explain_pod.section(entries, options.pod)
        _print((section,), lambda: explain_pod.to_json(entries, options.pod or ""), options)
    elif options.id is None:
        listed = decisions[-options.last :]
        _print((explain.list_section(listed),), lambda: explain.as_list(listed), options)
    else:
        story = _story(source, recorded_decisions.find_decision(source.decisions, options.id), options)
        if options.markdown:
            views = _views(story, config)
            standard_streams.write_output(post_mortem.document(story, views))
            return
        if options.html is not None:
            html_file.write(options.html, explain_page.title(story), explain_page.blocks(story, source.decisions))
        if options.html != html_file.STANDARD_OUTPUT:
            printed = options._replace(html=None)
            _print(story_text.sections(story), lambda: story_text.to_json(story), printed)


def _show_owner(
    source: Source, decisions: Sequence[RecordedDecision], options: ExplainOptions, config: "Config | None"
) -> None:
    pod = options.pod or ""
    if options.id is not None:
        recorded: RecordedDecision | None = recorded_decisions.find_decision(source.decisions, options.id)
    else:
        recorded = explain_pod.last_eviction(decisions, pod)
    if recorded is None:
        raise ExplainError(
            f"{pod}: no decision in these records evicts it; without --owner its other decisions are listed"
        )
    story = _story(source, recorded, options)
    used, unknown = _configuration(story, config)
    view = owner_view.view(story, pod, config=used, unknown=unknown)
    if view is None:
        raise ExplainError(f"{recorded.id}: does not evict {pod}")
    _print(owner_view.sections(view), lambda: owner_view.to_json(view), options)


def _story(source: Source, recorded: RecordedDecision, options: ExplainOptions) -> Story:
    since = None if options.since is None else options.since.wall(source.end)
    _, began, ended = stories.window(recorded, since=since)
    found = source.recording
    story = stories.build(
        recorded,
        source.decisions,
        () if found is None else found.samples(since_wall=began, until_wall=ended),
        since=since,
        missing=source.missing,
        configuration=source.configuration(recorded),
    )
    return story._replace(trouble=() if found is None else found.trouble)


def _views(story: Story, config: "Config | None") -> list[owner_view.OwnerView]:
    used, unknown = _configuration(story, config)
    pods = [record_fields.pod_name(victim) for victim in story.victims[:MAX_VIEWS]]
    views = (owner_view.view(story, pod, config=used, unknown=unknown) for pod in pods)
    return [view for view in views if view is not None]


def _configuration(story: Story, given: "Config | None") -> tuple["Config | None", str]:
    """The configuration in force and why it is not known."""
    from nodeagent.config import load
    from nodeagent.config.problems import ConfigError

    if not story.configuration:
        return given, "the configuration that was in force is not recorded: name it with --config"
    try:
        return load.loads(story.configuration, name="recorded configuration").config, ""
    except ConfigError as error:
        return given, f"the recorded configuration cannot be read: {error.problems[0].message}"


def _recent(source: Source, since: Since | None) -> Sequence[RecordedDecision]:
    if since is None:
        return source.decisions
    begin = since.wall(source.end)
    return [each for each in source.decisions if (_wall(each) or 0.0) >= begin]


def _wall(recorded: RecordedDecision) -> float | None:
    later = (*recorded.outcomes, *recorded.reliefs, *recorded.reclaims, *recorded.hooks, *recorded.resizes)
    for each in (recorded.decision, *later):
        if (wall := record_fields.number(each.get("wallTime"))) is not None:
            return wall
    return None


def _print(sections: Sequence[Any], to_json: Callable[[], dict[str, Any]], options: ExplainOptions) -> None:
    if options.html is not None:
        name = options.pod or "decisions"
        html_file.write(options.html, f"nodeagent explain: {name}", html_page.sections(sections))
    if options.html == html_file.STANDARD_OUTPUT:
        return
    printing.show(sections, to_json, output=options.output, color=options.color)
