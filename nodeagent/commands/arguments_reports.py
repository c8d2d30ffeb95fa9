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
  nodeagent explain --pod shop/web-1 --since 1h        what happened to a pod
  nodeagent explain --pod shop/web-1 --owner           why, and which request would have kept it
  nodeagent explain last --recording incident.zip      from a snapshot file
"""

_REPLAY_DESCRIPTION = """\
Repeat recorded decisions with another configuration and show the different victims. Nothing is changed and nothing is
sent. Each decision uses the recorded snapshot and state. If a soft threshold was not in force then, its grace period
counts as over, and the report marks it.
"""


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
        "--config", metavar="FILE", help="read stateDir from this file; with --owner also the configuration in force"
    )
    explain.add_argument("--pod", metavar="NAMESPACE/NAME", type=arguments_common.pod, help="all that touched this pod")
    explain.add_argument("--owner", action="store_true", help="with --pod: its last eviction for its owner")
    explain.add_argument("--markdown", action="store_true", help="one Markdown document, for a post-mortem")
    explain.add_argument(
        "--since",
        metavar="TIME",
        type=arguments_common.since,
        help="only what happened since: a duration (1h30m) or a time (RFC 3339); of a story the begin of its curves",
    )
    explain.add_argument(
        "-n", "--last", metavar="N", type=arguments_common.count, default=20, help="length of the list (default: 20)"
    )
    arguments_common.add_output(explain)
    explain.set_defaults(command="explain")


def add_replay(commands: "argparse._SubParsersAction[Parser]") -> None:
    """`nodeagent replay`."""
    replay = commands.add_parser(
        "replay",
        help="repeat recorded decisions with another configuration",
        description=_REPLAY_DESCRIPTION,
        formatter_class=Formatter,
    )
    replay.add_argument("place", metavar="FILE|DIR", help="a state directory, or a file of records (decisions.jsonl)")
    replay.add_argument("--config", metavar="FILE", required=True, help="the other configuration")
    arguments_common.add_output(replay)
    replay.set_defaults(command="replay")
