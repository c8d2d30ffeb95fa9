"""The command line of the commands that read records and recordings: their options and help texts."""

import argparse

from nodeagent.commands import arguments_common
from nodeagent.commands.arguments_common import Formatter, Parser

_EXPLAIN_DESCRIPTION = """\
Print the reasons of a decision from the records in the state directory: the samples and their ages, the threshold that
acted, the pods in order with their ranking keys, the protected pods with the reasons, the answers of the API server and
the measured relief. Without an ID the last decisions are listed. The id is the one in the log line, the Event and the
annotation.
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
        formatter_class=Formatter,
    )
    explain.add_argument(
        "id", metavar="ID", nargs="?", help="id of a decision or of OOM kills, its first characters, or `last`"
    )
    explain.add_argument(
        "--state-dir", metavar="DIR", help="directory of the records, or a file of records (default: stateDir)"
    )
    explain.add_argument("--config", metavar="FILE", help="read stateDir from this configuration file")
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
