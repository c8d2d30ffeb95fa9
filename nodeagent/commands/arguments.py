"""The command line: the parser of all commands. `arguments_reports` has those that read records and recordings."""

import argparse

from nodeagent import __version__
from nodeagent.commands import arguments_common, arguments_reports, exit_codes
from nodeagent.commands.arguments_common import Formatter, Parser

_DESCRIPTION = """\
nodeagent acts on node pressure before the kubelet and the OOM killer do. It samples memory, disk, inodes and PIDs of
this node, publishes pressure conditions and evicts pods through the Eviction API. Each decision has one record with the
reasons for what was done and what was refused.

Start with `nodeagent check`: it changes nothing and needs no cluster, configuration or rights.
"""

_EXAMPLES = """\
examples:
  nodeagent check                            report on this machine
  nodeagent check --watch 2                  report every two seconds
  nodeagent demo                             a recorded incident, with the kubelet alone and with nodeagent
  nodeagent check -o json | jq .signals      the same facts for programs
  nodeagent config show                      the effective configuration and where each value comes from
  nodeagent config validate FILE             every error in it, with line and key
  nodeagent run --config FILE --dry-run      dry run: decide and log, change nothing
  nodeagent explain last                     the reasons of the last decision
  nodeagent replay /run/nodeagent --config FILE     what another configuration would have done
  nodeagent tune /run/nodeagent              candidates for thresholds, from what was recorded
"""

_CHECK_DESCRIPTION = """\
Print one report of this node: every signal with its thresholds and headroom, the memory models side by side, stalls,
the conditions that would be published, and the pods in eviction order with the reasons. Nothing is changed. Without the
API server, pod names come from the log directory and requests are estimates; the report marks them.

With --rights the report is another one: every right in the API that the configuration uses, what needs it, whether the
credentials have it and through what, what fails without a missing one, and the rights beyond need. It asks the API
server by access reviews, which change nothing and need no right of their own. It works with the DaemonSet's token, with
a kubeconfig and with a node's own credentials.
"""

_CHECK_EXAMPLES = """\
examples:
  nodeagent check                                 this machine
  nodeagent check --signal nodefs.available       rank the pods for another signal
  nodeagent check --disk                          disk usage of pods and host directories
  nodeagent check --image-store                   images in use and unused, layers, orphans
  nodeagent check --host-root /host --api always  from a container that mounts the host there
  kubectl get pods -A -o json --field-selector spec.nodeName=NODE > pods.json
  nodeagent check --host-root DIR --pods pods.json     a recorded node, with its real requests
  nodeagent check --recording FILE --at 2026-11-24T13:05:00Z     a recorded sample
  nodeagent check --rights --config FILE          the rights in the API that FILE uses, missing ones and others
  kubectl exec -n nodeagent POD -- nodeagent check --rights      those of the DaemonSet
"""

_RUN_DESCRIPTION = """\
Act on pressure of this node until SIGTERM: publish conditions, keep new pods away with a taint, and evict pods when a
threshold has been met for its grace period. Without `mode: enforce` this is a dry run: it decides and logs the same and
changes nothing. SIGHUP or a changed file reloads the configuration; an invalid one is rejected and the old one stays in
force. The log goes to standard output, as JSON unless that is a terminal.
"""

_CONFIG_DESCRIPTION = """\
The configuration is one YAML file. Keys of a KubeletConfiguration keep the kubelet's names and meanings, so that its
eviction stanza can be pasted. Each key that is left out has a built-in default.
"""


def parser(*, only: str | None = None) -> argparse.ArgumentParser:
    """All commands, or the command `only` if it exists: building every parser costs 5 ms."""
    root = Parser(
        prog="nodeagent",
        description=_DESCRIPTION,
        epilog=f"{_EXAMPLES}\nexit codes:\n{exit_codes.as_text()}\n",
        formatter_class=Formatter,
    )
    root.add_argument("--version", action="version", version=f"nodeagent {__version__}")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=root.prog)
    for name, add in _ADD.items():
        if only not in _ADD or name == only:
            add(commands)
    return root


def _add_node_options(command: argparse.ArgumentParser) -> None:
    arguments_common.add_config(command)
    arguments_common.add_host_root(command)
    command.add_argument(
        "--node-name", metavar="NAME", help="name of this node's object (default: $NODE_NAME, then the host's name)"
    )
    command.add_argument("--kubeconfig", metavar="FILE", help="how to reach the API server outside a cluster")


def _add_check(commands: "argparse._SubParsersAction[Parser]") -> None:
    check = commands.add_parser(
        "check",
        help="report this node, change nothing",
        description=_CHECK_DESCRIPTION,
        epilog=f"{_CHECK_EXAMPLES}\nexit codes:\n{exit_codes.as_text()}\n",
        formatter_class=Formatter,
    )
    _add_node_options(check)
    check.add_argument("-o", "--output", choices=("text", "json", "yaml"), default="text", help="default: text")
    check.add_argument(
        "--api",
        choices=("auto", "always", "never"),
        default="auto",
        help="read pods from the API server: auto (if configured; default), always, never",
    )
    check.add_argument("--no-api", dest="api", action="store_const", const="never", help="the same as --api never")
    check.add_argument("--pods", metavar="FILE", help="read the pods from a PodList in JSON, not from the API server")
    check.add_argument(
        "--recording",
        metavar="FILE|DIR",
        help="report a sample of a snapshot file or a recorder's directory",
    )
    check.add_argument(
        "--at",
        metavar="TIME|ID",
        type=arguments_common.instant_or_id,
        help="with --recording: the sample at that time, or of that decision (default: the last one)",
    )
    check.add_argument("--signal", metavar="SIGNAL", help="rank the pods for this signal (default: the most urgent)")
    check.add_argument(
        "--disk", action="store_true", help="measure the disk usage of pods and host directories (up to a minute)"
    )
    check.add_argument(
        "--image-store",
        action="store_true",
        help="measure what fills the store of the container runtime, by class (up to half a minute)",
    )
    check.add_argument(
        "--rights",
        action="store_true",
        help="report the rights in the API instead: used, missing, beyond need (a few seconds)",
    )
    check.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        const=2.0,
        type=arguments_common.interval,
        help="repeat until Ctrl-C (default: 2 s); on a terminal a live view, left with q",
    )
    arguments_common.add_node_labels(check)
    arguments_common.add_html(check)
    check.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="default: on a terminal, unless NO_COLOR"
    )
    check.set_defaults(command="check")


def _add_run(commands: "argparse._SubParsersAction[Parser]") -> None:
    run = commands.add_parser("run", help="run the agent", description=_RUN_DESCRIPTION, formatter_class=Formatter)
    _add_node_options(run)
    run.add_argument("--dry-run", action="store_true", help="decide and log, change nothing, whatever `mode` is")
    run.add_argument("--once", action="store_true", help="one sync, then exit")
    run.set_defaults(command="run")


def _add_config(commands: "argparse._SubParsersAction[Parser]") -> None:
    config = commands.add_parser(
        "config",
        help="show, validate or describe the configuration",
        description=_CONFIG_DESCRIPTION,
        formatter_class=Formatter,
    )
    actions = config.add_subparsers(title="commands", metavar="COMMAND", required=True, prog=config.prog)
    show = actions.add_parser(
        "show",
        help="the effective configuration with each value's origin",
        description="Print the effective configuration: the values of the file, and built-in defaults for the "
        "rest. Each value has a comment with its origin, a threshold also the kubelet's above which it is kept.",
    )
    arguments_common.add_config(show)
    arguments_common.add_host_root(show)
    arguments_common.add_node_labels(show)
    show.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml", help="default: yaml")
    show.set_defaults(command="config show")
    validate = actions.add_parser(
        "validate",
        help="every error of these files; exit 0 valid, 1 not",
        description="Print every error of every file, with line and key. In a Kubernetes manifest the configuration in "
        "its ConfigMap is read; a manifest without one is listed. Exits with 0 if all files are valid, else with 1.",
    )
    validate.add_argument("files", metavar="FILE", nargs="+")
    validate.set_defaults(command="config validate")
    schema = actions.add_parser(
        "schema",
        help="the JSON Schema of the configuration, for editors",
        description="Print the JSON Schema of the configuration, for completion and checks in editors.",
    )
    schema.set_defaults(command="config schema")


def _add_completion(commands: "argparse._SubParsersAction[Parser]") -> None:
    completion = commands.add_parser(
        "completion",
        help="print a shell completion script",
        description="Print a completion script: source <(nodeagent completion bash)",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    completion.set_defaults(command="completion")


def _add_version(commands: "argparse._SubParsersAction[Parser]") -> None:
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(command="version")


_ADD = {
    "check": _add_check,
    "demo": arguments_reports.add_demo,
    "run": _add_run,
    "snapshot": arguments_reports.add_snapshot,
    "explain": arguments_reports.add_explain,
    "replay": arguments_reports.add_replay,
    "tune": arguments_reports.add_tune,
    "config": _add_config,
    "completion": _add_completion,
    "version": _add_version,
}
