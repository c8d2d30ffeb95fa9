"""The commands: parse, call, print. What they do is in the rooms; how they fail is one line on standard error.

Every room is imported by the command that needs it, so that `check` pays for nothing else. What else keeps it cheap is
here: its plain command lines are read without argparse (8% of its CPU), it collects no garbage in its few milliseconds
(7%), and leaves without taking the interpreter apart (12%; all measured with benchmarks/check_start.py).
"""

import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

from nodeagent import __version__
from nodeagent.commands import exit_codes, standard_streams

Options = Any
"""What argparse makes of the command line, or `quick` in its place."""


class _FailureError(Exception):
    """An expected failure: one line for the user, and the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Without `arguments` this is the program: it takes those of the process,
    and a single `check` ends the process here."""
    if arguments is not None:
        return _run_command(arguments)
    standard_streams.open_missing()
    code = _run_command(sys.argv[1:])
    if gc.isenabled():
        return code
    # A single check: everything is printed and closed, nothing is registered for the end.
    os._exit(code)


def _run_command(words: Sequence[str]) -> int:
    """The command's exit code, with everything printed."""
    try:
        try:
            options = quick(words) or _parsed(words)
            code = _COMMANDS[options.command](options)
        except SystemExit as stop:  # argparse: a help text was printed, or the usage
            code = stop.code if isinstance(stop.code, int) else exit_codes.USAGE
        standard_streams.write_output("")
    except _FailureError as failure:
        _complain(str(failure))
        return failure.code
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except standard_streams.OutputError as error:
        _complain(str(error))
        return exit_codes.UNKNOWN
    except Exception:
        import traceback

        standard_streams.write_error(traceback.format_exc())
        return exit_codes.INTERNAL
    return code


def _complain(message: str) -> None:
    from nodeagent.report.wording import escape_terminal

    standard_streams.write_error("".join([f"nodeagent: {escape_terminal(line)}\n" for line in message.splitlines()]))


# --- parsing ---------------------------------------------------------------------------------------------------------


_CHECK: Final[Mapping[str, Any]] = {
    "config": None,
    "host_root": "/",
    "node_name": None,
    "kubeconfig": None,
    "output": "text",
    "api": "auto",
    "pods": None,
    "signal": None,
    "disk": False,
    "watch": None,
    "color": "auto",
    "command": "check",
}
_PLAIN_VALUES: Final = ("config", "host_root", "node_name", "kubeconfig", "pods", "signal")
_OUTPUTS: Final = ("text", "json", "yaml")


def quick(words: Sequence[str]) -> Options | None:
    """The options of a plain `check`, read as argparse would; None for everything else: other commands, help,
    abbreviations, mistakes. tests/unit/commands/test_cli.py holds it to argparse."""
    if not words or words[0] != "check":
        return None
    found = dict(_CHECK)
    rest = iter(words[1:])
    for word in rest:
        if word == "--no-api":
            found["api"] = "never"
            continue
        if word == "--disk":
            found["disk"] = True
            continue
        name = "output" if word == "-o" else word.removeprefix("--").replace("-", "_")
        value = next(rest, "-")
        if value.startswith("-") or (word != "-o" and not word.startswith("--")):
            return None
        if not (name in _PLAIN_VALUES or (name == "output" and value in _OUTPUTS)):
            return None
        found[name] = value
    return SimpleNamespace(**found)


def _parsed(words: Sequence[str]) -> Options:
    from nodeagent.commands import arguments

    return arguments.parser(only=words[0] if words else None).parse_args(words)


# --- commands --------------------------------------------------------------------------------------------------------


def _version(_: Options) -> int:
    standard_streams.write_output(f"nodeagent {__version__}\n")
    return exit_codes.OK


def _completion(options: Options) -> int:
    import shtab

    from nodeagent.commands import arguments

    standard_streams.write_output(shtab.complete(arguments.parser(), shell=options.shell) + "\n")
    return exit_codes.OK


def _check(options: Options) -> int:
    if options.watch is None:
        gc.disable()
    from nodeagent.commands import check

    try:
        wish = check.wish(
            host_root=options.host_root,
            config_file=options.config,
            node_name=options.node_name,
            kubeconfig=options.kubeconfig,
            api=options.api,
            pods_file=options.pods,
            signal=options.signal,
            disk=options.disk,
        )
        return check.show(wish, output=options.output, color=options.color, every_s=options.watch)
    except check.CheckError as error:
        raise _FailureError(str(error), error.kind) from error


def _run(options: Options) -> int:
    from nodeagent.config.problems import ConfigError
    from nodeagent.kube.node_identity import IdentityError
    from nodeagent.loop import assembly

    try:
        return assembly.run(
            config_path=options.config,
            host_root=options.host_root,
            node_name=options.node_name,
            kubeconfig=options.kubeconfig,
            dry_run=options.dry_run,
            once=options.once,
        )
    except assembly.CannotRunError as error:
        raise _FailureError(str(error), error.code) from error
    except (ConfigError, IdentityError) as error:
        raise _FailureError(str(error), exit_codes.CONFIG) from error


def _explain(options: Options) -> int:
    from pathlib import Path

    from nodeagent.report import explain, printing

    place = Path(options.state_dir or _loaded(options.config).config.state_dir)
    try:
        every = explain.read_decisions(place)
        if options.id is None:
            chosen = every[-options.last :]
            printing.show(
                (explain.list_section(chosen),),
                lambda: explain.as_list(chosen),
                output=options.output,
                color=options.color,
            )
            return exit_codes.OK
        story = explain.find_decision(every, options.id)
    except explain.ExplainError as error:
        raise _FailureError(str(error), exit_codes.UNKNOWN) from error
    printing.show(explain.sections(story), lambda: explain.to_json(story), output=options.output, color=options.color)
    return exit_codes.OK


def _replay(options: Options) -> int:
    from pathlib import Path

    from nodeagent.commands import replay
    from nodeagent.report import printing

    config = _loaded(options.config).config
    try:
        rows = replay.replay(Path(options.place), config)
    except replay.ReplayError as error:
        raise _FailureError(str(error), exit_codes.UNKNOWN) from error
    printing.show(
        replay.sections(rows, config_source=options.config),
        lambda: replay.to_json(rows, config_source=options.config),
        output=options.output,
        color=options.color,
    )
    return exit_codes.OK


def _loaded(path: str | None) -> Any:
    from nodeagent.config import load, problems

    try:
        return load.load(path, overrides=load.overrides_from(os.environ))
    except problems.ConfigError as error:
        raise _FailureError(str(error), exit_codes.CONFIG) from error


def _config_show(options: Options) -> int:
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
    standard_streams.write_output(shown)
    return exit_codes.OK


def _config_validate(options: Options) -> int:
    """0: all are valid. 1: some are not; every problem of every file is printed."""
    from nodeagent.config import load, problems, show
    from nodeagent.report import wording

    valid = True
    for path in options.files:
        for name, found in load.load_embedded(path):
            if isinstance(found, problems.ConfigError):
                valid = False
                standard_streams.write_error(show.explain_problems(found))
            elif isinstance(found, str):
                standard_streams.write_output(f"{wording.escape_terminal(name)}: {found}\n")
            else:
                standard_streams.write_error(show.explain_warnings(found))
                standard_streams.write_output(f"{wording.escape_terminal(name)}: valid\n")
    return 0 if valid else 1


def _config_schema(_: Options) -> int:
    from nodeagent.config import jsonschema

    standard_streams.write_output(jsonschema.text())
    return exit_codes.OK


_COMMANDS: Final[Mapping[str, Callable[[Options], int]]] = {
    "check": _check,
    "run": _run,
    "explain": _explain,
    "replay": _replay,
    "config show": _config_show,
    "config validate": _config_validate,
    "config schema": _config_schema,
    "completion": _completion,
    "version": _version,
}
