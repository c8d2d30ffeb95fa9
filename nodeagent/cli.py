"""The commands: parse, call, print. What they do is in the rooms; how they fail is one line on standard error.

Every room is imported by the command that needs it, so that `check` pays for nothing else.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from nodeagent import __version__
from nodeagent.report import exit_codes

_DESCRIPTION = """\
nodeagent acts on node pressure before the kubelet and the OOM killer do: it watches memory, disk, inodes and PIDs of
this node, publishes pressure conditions and evicts pods through the Eviction API, one record with the reasons for
everything it does and everything it refuses to do.

Start with `nodeagent check`: it changes nothing and needs no cluster, no configuration and no rights.
"""

_EXAMPLES = """\
examples:
  nodeagent check                            report on this machine
  nodeagent check --watch 2                  again every two seconds
  nodeagent check -o json | jq .signals      the same facts for programs
  nodeagent config show                      the effective configuration and where each value comes from
  nodeagent config validate FILE             every mistake in it, with line and key
  nodeagent run --config FILE --dry-run      the agent, deciding and logging but touching nothing
"""

_CHECK_DESCRIPTION = """\
Print one report of this node: every signal with its thresholds and headroom, the memory models side by side, stalls,
the conditions that would be published, and the pods in the order in which they would be evicted, with the reasons.
Nothing is changed. Without the API, names come from the log directory and requests are estimates; the report says so.
"""

_CHECK_EXAMPLES = """\
examples:
  nodeagent check                                 this machine
  nodeagent check --signal nodefs.available       rank the pods for another signal
  nodeagent check --host-root /host --api always  from a container that mounts the host there
  kubectl get pods -A -o json --field-selector spec.nodeName=NODE > pods.json
  nodeagent check --host-root DIR --pods pods.json     a recorded node, with its real requests
"""


class _FailureError(Exception):
    """An expected failure: one line for the user, and the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class _Parser(argparse.ArgumentParser):
    """argparse exits with 2 on wrong usage, which monitoring would read as `hard`."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(exit_codes.USAGE, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        options = parser().parse_args(arguments)
        code: int = options.command(options)
        sys.stdout.flush()
    except _FailureError as failure:
        _complain(str(failure))
        return failure.code
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted. Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exit_codes.OK
    return code


def _complain(message: str) -> None:
    from nodeagent.report.words import harmless

    for line in message.splitlines():
        print(f"nodeagent: {harmless(line)}", file=sys.stderr)


# --- parsing ---------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The whole command line; also what shell completion is made from."""
    root = _Parser(
        prog="nodeagent",
        description=_DESCRIPTION,
        epilog=f"{_EXAMPLES}\nexit codes:\n{exit_codes.as_text()}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"nodeagent {__version__}")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_check(commands)
    _add_run(commands)
    _add_config(commands)
    _add_completion(commands)
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(command=_version)
    return root


def _add_node_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", metavar="FILE", help="configuration file (default: the built-in defaults)")
    command.add_argument(
        "--host-root", metavar="DIR", default="/", help="read another root: the DaemonSet's /host, a recorded node"
    )
    command.add_argument(
        "--node-name", metavar="NAME", help="name of this node's object (default: $NODE_NAME, then the host's name)"
    )
    command.add_argument("--kubeconfig", metavar="FILE", help="how to reach the API outside a cluster")


def _add_check(commands: "argparse._SubParsersAction[_Parser]") -> None:
    check = commands.add_parser(
        "check",
        help="report this node, change nothing",
        description=_CHECK_DESCRIPTION,
        epilog=f"{_CHECK_EXAMPLES}\nexit codes:\n{exit_codes.as_text()}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_node_options(check)
    check.add_argument("-o", "--output", choices=("text", "json", "yaml"), default="text", help="default: text")
    check.add_argument(
        "--api",
        choices=("auto", "always", "never"),
        default="auto",
        help="ask the API for pods: when it is configured (default), always, never",
    )
    check.add_argument("--no-api", dest="api", action="store_const", const="never", help="the same as --api never")
    check.add_argument("--pods", metavar="FILE", help="take the pods from a PodList in JSON instead of the API")
    check.add_argument("--signal", metavar="SIGNAL", help="rank the pods for this signal (default: the most urgent)")
    check.add_argument(
        "--watch", metavar="SECONDS", nargs="?", const=2.0, type=_interval, help="repeat until Ctrl-C (default: 2 s)"
    )
    check.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="default: on a terminal, unless NO_COLOR"
    )
    check.set_defaults(command=_check)


def _add_run(commands: "argparse._SubParsersAction[_Parser]") -> None:
    run = commands.add_parser("run", help="run the agent", description="Watch this node and act on its pressure.")
    _add_node_options(run)
    run.add_argument("--dry-run", action="store_true", help="decide and log, send nothing, whatever `mode` says")
    run.add_argument("--once", action="store_true", help="one round of the loop, then exit")
    run.set_defaults(command=_run)


def _add_config(commands: "argparse._SubParsersAction[_Parser]") -> None:
    config = commands.add_parser("config", help="show, validate or describe the configuration")
    actions = config.add_subparsers(title="commands", metavar="COMMAND", required=True)
    show = actions.add_parser("show", help="the effective configuration with each value's origin")
    show.add_argument("--config", metavar="FILE", help="configuration file (default: the built-in defaults)")
    show.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml", help="default: yaml")
    show.set_defaults(command=_config_show)
    validate = actions.add_parser("validate", help="every error of these files; exit 0 valid, 1 not")
    validate.add_argument("files", metavar="FILE", nargs="+")
    validate.set_defaults(command=_config_validate)
    schema = actions.add_parser("schema", help="the JSON Schema of the configuration, for editors")
    schema.set_defaults(command=_config_schema)


def _add_completion(commands: "argparse._SubParsersAction[_Parser]") -> None:
    completion = commands.add_parser(
        "completion",
        help="print a shell completion script",
        description="Print a completion script: source <(nodeagent completion bash)",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    completion.set_defaults(command=_completion)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds between 0.1 and 86400")
    return seconds


# --- commands --------------------------------------------------------------------------------------------------------


def _version(_: argparse.Namespace) -> int:
    print(f"nodeagent {__version__}")
    return exit_codes.OK


def _completion(options: argparse.Namespace) -> int:
    import shtab

    print(shtab.complete(parser(), shell=options.shell))
    return exit_codes.OK


def _check(options: argparse.Namespace) -> int:
    from nodeagent.report import check

    try:
        wish = check.wish(
            host_root=options.host_root,
            config_file=options.config,
            node_name=options.node_name,
            kubeconfig=options.kubeconfig,
            api=options.api,
            pods_file=options.pods,
            signal=options.signal,
        )
        return check.show(wish, output=options.output, color=options.color, every_s=options.watch)
    except check.CheckError as error:
        raise _FailureError(str(error), error.code) from error


def _run(options: argparse.Namespace) -> int:
    from nodeagent import daemon
    from nodeagent.cluster.identity import IdentityError
    from nodeagent.config.problems import ConfigError

    try:
        return daemon.run(
            config_path=options.config,
            host_root=options.host_root,
            node_name=options.node_name,
            kubeconfig=options.kubeconfig,
            dry_run=options.dry_run,
            once=options.once,
        )
    except (ConfigError, IdentityError, daemon.CannotRunError) as error:
        raise _FailureError(str(error), exit_codes.CONFIG) from error


def _config_show(options: argparse.Namespace) -> int:
    from nodeagent.config import load, problems, show

    try:
        loaded = load.load(options.config, overrides=load.overrides_from(os.environ))
    except problems.ConfigError as error:
        raise _FailureError(str(error), exit_codes.CONFIG) from error
    shown = show.show(loaded)
    if options.output == "json":
        import json

        import yaml

        shown = json.dumps(yaml.safe_load(shown), indent=2) + "\n"
    sys.stdout.write(shown)
    return exit_codes.OK


def _config_validate(options: argparse.Namespace) -> int:
    """0: all are valid. 1: some are not; every problem of every file is printed."""
    from nodeagent.config import load, problems, show

    valid = True
    for path in options.files:
        try:
            loaded = load.load(path)
        except problems.ConfigError as error:
            valid = False
            sys.stderr.write(show.explain_problems(error))
            continue
        sys.stderr.write(show.explain_warnings(loaded))
        print(f"{path}: valid")
    return 0 if valid else 1


def _config_schema(_: argparse.Namespace) -> int:
    from nodeagent.config import jsonschema

    sys.stdout.write(jsonschema.text())
    return exit_codes.OK
