"""The command line of the commands that read records and recordings: their options and help texts."""

import argparse

from nodeagent.commands import arguments_common
from nodeagent.commands.arguments_common import Formatter, Parser

_EXPLAIN_DESCRIPTION = """\
Print the story of a decision from the records in the state directory: the minutes before as curves, what was seen,
decided, done and what came of it; then the samples and their ages, the threshold that acted, the pods in order with
their ranking keys, the protected pods with the reasons, the answers of the API server and the measured relief. Without
an ID the last decisions are listed. The id is the one in the log line, the Event and the annotation. The curves need
the samples of the recorder; without them the rest is printed.

With --owner the report is for the owner of an evicted pod: what it used, what it asked for, how that compares with the
other pods of the node, and which request would have kept it. The decision is made again with other requests for that;
the configuration in force is taken from the recording, else from --config.
"""

_EXPLAIN_EXAMPLES = """\
examples:
  nodeagent explain                                    the last decisions
  nodeagent explain last                               the story of the last one
  nodeagent explain last --markdown > post-mortem.md   the same for a ticket
  nodeagent explain last --html post-mortem.html       the same as a page with charts
  nodeagent explain --pod shop/web-1 --since 1h        what happened to a pod
  nodeagent explain --pod shop/web-1 --owner           why, and which request would have kept it
  nodeagent explain last --recording incident.zip      from a snapshot file
"""

_REPLAY_DESCRIPTION = """\
Replay a recording with another configuration. Nothing is changed and nothing is sent.

Recorded samples are simulated: the policy runs over all of them from a fresh state, with one configuration or two side
by side, and the report has the evictions, the pods spared, the time under pressure and the lowest values. Recorded
decisions are repeated one by one with their recorded snapshot and state, and the different victims are shown. If a soft
threshold was not in force then, its grace period counts as over, and the report marks it. The report ends with what a
recording cannot tell.
"""

_REPLAY_EXAMPLES = """\
examples:
  nodeagent replay /run/nodeagent --config new.yaml               this node's recording with new.yaml
  nodeagent replay snapshot.zip --config old.yaml --compare new.yaml     both side by side
  nodeagent replay snapshot.zip --config new.yaml --html replay.html     the same as a page with charts
  nodeagent replay snapshot.zip --config new.yaml -o json | jq '.simulation.configurations[].evictions[].pod'
  nodeagent replay --prometheus http://prometheus:9090 --node NODE --since 7d --step 15s --config new.yaml

docs/replay.md has a worked example and the assumptions.
"""

_TUNE_DESCRIPTION = """\
Measure candidates for thresholds and grace periods on recordings: how often each would have given an alarm, how many of
these were false (the level recovered on its own), which exhaustions it would have missed, and how long before an
exhaustion it was due. The configured thresholds are among the candidates. Nothing is changed: the last part of the
report is a stanza to paste into a configuration.
"""

_TUNE_EXAMPLES = """\
examples:
  nodeagent tune /run/nodeagent                         the recording of this node
  nodeagent tune node-*.zip --config current.yaml       several snapshot files, beside current.yaml's thresholds
  nodeagent tune snapshot.zip --html tune.html          the same as a page with curves
  nodeagent tune snapshot.zip -o json | jq -r .stanza > stanza.yaml && nodeagent config validate stanza.yaml
  nodeagent tune --prometheus http://prometheus:9090 --node NODE --since 30d --step 60s

docs/replay.md defines false alarm, miss and lead time.
"""

_DEMO_DESCRIPTION = """\
Play a recorded incident in the terminal, in ten seconds: a pod takes memory until the node has none, once with a
kubelet alone and once with nodeagent. What the kubelet and the kernel did is as recorded; nodeagent's decisions are
computed now by its policy on the recorded samples. Nothing of this machine is read or changed. Without a terminal, the
end is printed at once.
"""


def add_demo(commands: "argparse._SubParsersAction[Parser]") -> None:
    """`nodeagent demo`."""
    demo = commands.add_parser(
        "demo",
        help="play a recorded incident, with the kubelet alone and with nodeagent",
        description=_DEMO_DESCRIPTION,
        formatter_class=Formatter,
    )
    demo.add_argument(
        "--speed",
        metavar="N",
        type=arguments_common.speed,
        default=4.0,
        help="N times as fast as it happened (default: 4)",
    )
    demo.add_argument("--no-animation", dest="animation", action="store_false", help="print the end at once")
    arguments_common.add_html(demo)
    arguments_common.add_output(demo)
    demo.set_defaults(command="demo")


_SNAPSHOT_DESCRIPTION = """\
Write one file with everything that is recorded of this node: samples, decisions, the configuration, versions, the
kubelet's settings for eviction, and facts about the kernel. It is for a ticket or a post-mortem: check --recording,
explain and replay read it on any machine. It contains no credentials, no environment and no arguments of configured
commands; --pseudonyms also replaces names. Nothing is changed.
"""

_SNAPSHOT_EXAMPLES = """\
examples:
  nodeagent snapshot                                  everything that is recorded
  nodeagent snapshot --around last -o ticket.zip      15 minutes before the last decision to 5 minutes after it
  nodeagent snapshot --since 1h --pseudonyms          the last hour, without names
  nodeagent snapshot --list                           those that the agent has made by itself
  nodeagent check --recording ticket.zip              the last sample in it
  nodeagent explain last --recording ticket.zip       the last decision in it
"""


def add_snapshot(commands: "argparse._SubParsersAction[Parser]") -> None:
    """`nodeagent snapshot`."""
    snapshot = commands.add_parser(
        "snapshot",
        help="write one file with everything that is recorded, for a ticket",
        description=_SNAPSHOT_DESCRIPTION,
        epilog=_SNAPSHOT_EXAMPLES,
        formatter_class=Formatter,
    )
    what = snapshot.add_mutually_exclusive_group()
    what.add_argument(
        "--around",
        metavar="ID",
        help="the time around a decision or OOM kills: id, its first characters, or `last`",
    )
    what.add_argument(
        "--since",
        metavar="TIME",
        type=arguments_common.since,
        help="a duration back from now (1h30m) or a time (2026-11-24T13:05:00Z); default: all",
    )
    snapshot.add_argument(
        "-o", "--output", metavar="FILE", help="default: nodeagent-NODE-TIME.zip; `-`: standard output"
    )
    snapshot.add_argument("--force", action="store_true", help="replace FILE if it exists")
    snapshot.add_argument(
        "--pseudonyms",
        action="store_true",
        help="replace the names of pods, namespaces, owners, containers, volumes, labels, the node and paths",
    )
    snapshot.add_argument("--list", action="store_true", help="list the snapshots that the agent has made by itself")
    snapshot.add_argument("--state-dir", metavar="DIR", help="directory of the records (default: stateDir)")
    arguments_common.add_config(snapshot)
    arguments_common.add_host_root(snapshot)
    snapshot.add_argument("--html", metavar="PAGE", help="write what the file contains as a page with charts as well")
    snapshot.set_defaults(command="snapshot")


def add_explain(commands: "argparse._SubParsersAction[Parser]") -> None:
    """`nodeagent explain`."""
    explain = commands.add_parser(
        "explain",
        help="the reasons of a decision",
        description=_EXPLAIN_DESCRIPTION,
        epilog=_EXPLAIN_EXAMPLES,
        formatter_class=Formatter,
    )
    explain.add_argument(
        "id", metavar="ID", nargs="?", help="id of a decision or of OOM kills, its first characters, or `last`"
    )
    explain.add_argument(
        "--state-dir", metavar="DIR", help="directory of the records, or a file of records (default: stateDir)"
    )
    explain.add_argument(
        "--recording", metavar="FILE|DIR", help="read a snapshot file or a recorder's directory instead"
    )
    explain.add_argument(
        "--config",
        metavar="FILE",
        help="read stateDir from this file; with --owner also the configuration in force (default: $NODEAGENT_CONFIG)",
    )
    explain.add_argument("--pod", metavar="NAMESPACE/NAME", type=arguments_common.pod, help="all that touched this pod")
    explain.add_argument("--owner", action="store_true", help="with --pod: its last eviction for its owner")
    explain.add_argument("--markdown", action="store_true", help="one Markdown document, for a post-mortem")
    explain.add_argument(
        "--since",
        metavar="TIME",
        type=arguments_common.since,
        help="what happened since: a duration (1h30m) or a time (RFC 3339); of one decision the begin of its curves",
    )
    explain.add_argument(
        "-n", "--last", metavar="N", type=arguments_common.count, default=20, help="length of the list (default: 20)"
    )
    arguments_common.add_output(explain)
    arguments_common.add_html(explain)
    explain.set_defaults(command="explain")


def add_replay(commands: "argparse._SubParsersAction[Parser]") -> None:
    """`nodeagent replay`."""
    replay = commands.add_parser(
        "replay",
        help="what another configuration would have done",
        description=_REPLAY_DESCRIPTION,
        epilog=_REPLAY_EXAMPLES,
        formatter_class=Formatter,
    )
    replay.add_argument(
        "place",
        metavar="FILE|DIR",
        nargs="?",
        help="a snapshot file, a state or recorder directory, a .rec file, or a file of records (decisions.jsonl)",
    )
    replay.add_argument("--config", metavar="FILE", required=True, help="the configuration to replay with")
    replay.add_argument("--compare", metavar="FILE", help="a second configuration, side by side with the first")
    _add_prometheus(replay)
    arguments_common.add_output(replay)
    replay.add_argument("--html", metavar="FILE", help="write the report as a page with charts as well")
    replay.set_defaults(command="replay")


def add_tune(commands: "argparse._SubParsersAction[Parser]") -> None:
    """`nodeagent tune`."""
    tune = commands.add_parser(
        "tune",
        help="candidates for thresholds and grace periods",
        description=_TUNE_DESCRIPTION,
        epilog=_TUNE_EXAMPLES,
        formatter_class=Formatter,
    )
    tune.add_argument(
        "places", metavar="FILE|DIR", nargs="*", help="snapshot files, state or recorder directories, .rec files"
    )
    tune.add_argument(
        "--config",
        metavar="FILE",
        help="its thresholds are candidates too (default: $NODEAGENT_CONFIG, or built-in ones)",
    )
    tune.add_argument(
        "--within",
        metavar="TIME",
        type=arguments_common.span,
        default="10m",
        help="an exhaustion this long after an alarm makes it a true one (default: 10m)",
    )
    _add_prometheus(tune)
    arguments_common.add_output(tune)
    tune.add_argument("--html", metavar="FILE", help="write the report as a page with curves as well")
    tune.set_defaults(command="tune")


def _add_prometheus(command: argparse.ArgumentParser) -> None:
    """Where the history of a node comes from, if not from a recording."""
    group = command.add_argument_group("history from a Prometheus")
    group.add_argument(
        "--prometheus", metavar="URL", help="read the series of node_exporter and cAdvisor from this server instead"
    )
    group.add_argument("--node", metavar="NODE", help="the node's name there (label node or instance, or its nodename)")
    group.add_argument(
        "--since",
        metavar="TIME",
        type=arguments_common.since,
        default="1d",
        help="how far back (default: 1d), or from when",
    )
    group.add_argument(
        "--step", metavar="TIME", type=arguments_common.span, default="15s", help="distance of samples (default: 15s)"
    )
    group.add_argument(
        "--header-file", metavar="FILE", help="a bearer token, or one header `Name: value`, for each request"
    )
    group.add_argument("--ca-file", metavar="FILE", help="PEM file of the authorities that sign its certificate")
