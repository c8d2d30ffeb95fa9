"""The commands: parse the arguments, call the packages, print the result. A failure is one line on standard error.

Each command imports its packages itself, so that `check` loads only what one report needs. The bound is 6 times
`python -c pass` (benchmarks/check_start.py).
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from nodeagent import __version__
from nodeagent.commands import arguments as command_line
from nodeagent.commands import arguments_common, exit_codes, standard_streams

Options = Any
"""The namespace that argparse returns."""


class _FailureError(Exception):
    """An expected failure: a message for the user and the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Without `arguments` the command line of the process is used."""
    if arguments is None:
        standard_streams.open_missing()
        arguments = sys.argv[1:]
    return _run_command(arguments)


def _run_command(words: Sequence[str]) -> int:
    """Run the command, flush its output and return its exit code."""
    try:
        try:
            options = command_line.parser(only=words[0] if words else None).parse_args(words)
            code = _COMMANDS[options.command](options)
        except SystemExit as stop:  # argparse has printed a help text or the usage
            code = stop.code if isinstance(stop.code, int) else exit_codes.USAGE
        standard_streams.write_output("")
    except _FailureError as failure:
        _print_failure(str(failure))
        return failure.code
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except standard_streams.OutputError as error:
        _print_failure(str(error))
        return exit_codes.UNKNOWN
    except Exception:
        import traceback

        standard_streams.write_error(traceback.format_exc())
        return exit_codes.INTERNAL
    return code


def _print_failure(message: str) -> None:
    from nodeagent.report import wording

    standard_streams.write_error(
        "".join([f"nodeagent: {wording.escape_terminal(line)}\n" for line in message.splitlines()])
    )


# --- commands --------------------------------------------------------------------------------------------------------


def _version(_: Options) -> int:
    standard_streams.write_output(f"nodeagent {__version__}\n")
    return exit_codes.OK


def _completion(options: Options) -> int:
    import shtab

    standard_streams.write_output(shtab.complete(command_line.parser(), shell=options.shell) + "\n")
    return exit_codes.OK


def _check(options: Options) -> int:
    from nodeagent.commands import check, check_output

    if options.recording is not None:
        return _check_recording(options)
    if options.at is not None:
        raise _FailureError("--at: only with --recording", exit_codes.USAGE)
    if options.rights:
        return _check_rights(options)
    try:
        check_options = check.options_from(
            host_root=options.host_root,
            config_file=arguments_common.config_file(options.config),
            node_name=options.node_name,
            kubeconfig=options.kubeconfig,
            api=options.api,
            pods_file=options.pods,
            signal=options.signal,
            disk=options.disk,
            image_store=options.image_store,
            node_labels=options.node_labels,
        )
        return check_output.show(
            check_options, output=options.output, color=options.color, every_s=options.watch, html=options.html
        )
    except check.CheckError as error:
        raise _FailureError(str(error), error.kind) from error


def _check_recording(options: Options) -> int:
    from pathlib import Path

    from nodeagent.commands import check, check_output, check_recording

    _refuse_with("--recording", options, rights=options.rights)
    loaded = _load_config(options.config, labels=options.node_labels) if options.config is not None else None
    try:
        found = check_recording.make_report(
            Path(options.recording),
            at=options.at,
            loaded=loaded,
            config_source=options.config,
            signal=check.signal_from(options.signal),
        )
        return check_output.show_recorded(
            found.report, found.samples, output=options.output, color=options.color, html=options.html
        )
    except check.CheckError as error:
        raise _FailureError(str(error), error.kind) from error


def _refuse_with(option: str, options: Options, **more: bool) -> None:
    """Options of `check` that a report which is not of the live node cannot use."""
    others = {
        "--api never": options.api == "never",
        "--pods": options.pods is not None,
        "--disk": options.disk,
        "--image-store": options.image_store,
        "--watch": options.watch is not None,
        **{f"--{name}": given for name, given in more.items()},
    }
    if wrong := [name for name, given in others.items() if given]:
        raise _FailureError(f"{option}: cannot be combined with {', '.join(wrong)}", exit_codes.USAGE)


def _check_rights(options: Options) -> int:
    from nodeagent.commands import check, check_rights

    _refuse_with("--rights", options, signal=options.signal is not None, html=options.html is not None)
    try:
        return check_rights.show(
            config_file=arguments_common.config_file(options.config),
            host_root=options.host_root,
            node_name=options.node_name,
            kubeconfig=options.kubeconfig,
            labels=options.node_labels,
            output=options.output,
            color=options.color,
        )
    except check.CheckError as error:
        raise _FailureError(str(error), error.kind) from error


def _demo(options: Options) -> int:
    from nodeagent.commands import demo

    try:
        return demo.show(
            output=options.output,
            color=options.color,
            html=options.html,
            animation=options.animation,
            speed=options.speed,
        )
    except demo.DemoError as error:
        raise _FailureError(str(error), error.kind) from error


def _run(options: Options) -> int:
    from nodeagent.commands import run
    from nodeagent.config.problems import ConfigError
    from nodeagent.kube.node_identity import IdentityError
    from nodeagent.loop.assembly import CannotRunError, CannotRunKind

    try:
        return run.run(
            config_path=arguments_common.config_file(options.config),
            host_root=options.host_root,
            node_name=options.node_name,
            kubeconfig=options.kubeconfig,
            dry_run=options.dry_run,
            once=options.once,
        )
    except CannotRunError as error:
        usage = error.kind is CannotRunKind.USAGE
        raise _FailureError(str(error), exit_codes.USAGE if usage else exit_codes.CONFIG) from error
    except (ConfigError, IdentityError) as error:
        raise _FailureError(str(error), exit_codes.CONFIG) from error


def _snapshot(options: Options) -> int:
    import time

    from nodeagent.commands import snapshot

    if options.html is not None and "-" in (options.html, options.output):
        raise _FailureError("--html: needs names for both files, the snapshot and the page", exit_codes.USAGE)
    loaded = _load_config(arguments_common.config_file(options.config), of_this_node=True)
    wall = time.time()
    try:
        if options.list:
            return snapshot.show_list(options.state_dir, loaded.config)
        written = snapshot.write(
            snapshot.SnapshotOptions(
                output=options.output,
                around=options.around,
                since=options.since.wall(wall) if options.since is not None else None,
                pseudonyms=options.pseudonyms,
                force=options.force,
                host_root=options.host_root,
                state_dir=options.state_dir,
            ),
            loaded,
            wall=wall,
        )
        if options.html is not None:
            from nodeagent.commands import snapshot_page

            snapshot_page.write(written, options.html)
    except snapshot.SnapshotCommandError as error:
        raise _FailureError(str(error), error.kind) from error
    for each in written.manifest.missing:
        _print_failure(f"not included: {each}")
    if written.path != snapshot.STANDARD_OUTPUT:
        standard_streams.write_output(f"{written.path}\n")
    return exit_codes.OK


def _explain(options: Options) -> int:
    from pathlib import Path

    from nodeagent.commands import explain
    from nodeagent.report.recorded_decisions import ExplainError

    wrong = [
        (options.owner and options.pod is None, "--owner: needs --pod NAMESPACE/NAME"),
        (options.markdown and options.id is None, "--markdown: needs the ID of a decision, or `last`"),
        (options.markdown and options.pod is not None, "--markdown: cannot be combined with --pod"),
        (options.markdown and options.output != "text", f"--markdown: cannot be combined with -o {options.output}"),
        (options.html == "-" and options.output != "text", "--html -: cannot be combined with --output"),
        (options.html is not None and options.markdown, "--html: cannot be combined with --markdown"),
        (options.recording and options.state_dir, "--recording: cannot be combined with --state-dir"),
        (options.pod and options.id and not options.owner, "--pod: lists every decision; an ID needs --owner"),
        ("/" in (options.id or ""), f"{options.id}: is no ID; a file or directory is read with --recording"),
    ]
    if message := next((text for given, text in wrong if given), ""):
        raise _FailureError(message, exit_codes.USAGE)
    given = options.recording or options.state_dir
    named = arguments_common.config_file(options.config)
    config = None if given is not None and options.config is None else _load_config(named, of_this_node=True).config
    try:
        if given is not None or config is None:
            source = explain.open_source(Path(given or ""), now=time.time())
        else:
            elsewhere = Path(config.recorder.dir) if config.recorder.dir else None
            source = explain.open_source(Path(config.state_dir), now=time.time(), samples_at=elsewhere)
        explain.show(
            source,
            explain.ExplainOptions(
                id=options.id,
                last=options.last,
                pod=options.pod,
                owner=options.owner,
                markdown=options.markdown,
                since=options.since,
                output=options.output,
                color=options.color,
                html=options.html,
            ),
            config=config if named is not None else None,
        )
    except ExplainError as error:
        raise _FailureError(str(error), exit_codes.UNKNOWN) from error
    return exit_codes.OK


def _replay(options: Options) -> int:
    from nodeagent.commands import replay, replay_report

    prometheus = _prometheus(options, [options.place] if options.place is not None else [])
    names = [options.config, *([options.compare] if options.compare is not None else [])]
    try:
        replay_report.run(
            place=options.place,
            prometheus=prometheus,
            configs=[(name, _load_config(name).config) for name in names],
            output=options.output,
            color=options.color,
            html=options.html,
        )
    except replay.ReplayError as error:
        raise _FailureError(str(error), exit_codes.UNKNOWN) from error
    return exit_codes.OK


def _tune(options: Options) -> int:
    from nodeagent.commands import tune

    prometheus = _prometheus(options, options.places)
    try:
        tune.run(
            places=options.places,
            prometheus=prometheus,
            config=_load_config(arguments_common.config_file(options.config)).config,
            within_s=options.within,
            output=options.output,
            color=options.color,
            html=options.html,
        )
    except tune.TuneError as error:
        raise _FailureError(str(error), exit_codes.UNKNOWN) from error
    return exit_codes.OK


def _prometheus(options: Options, places: Sequence[str]) -> Any:
    """The options of a history from a Prometheus; None if a recording is read."""
    from nodeagent.commands.recorded_input import PrometheusOptions

    if options.prometheus is None:
        if options.node is not None:
            raise _FailureError("--node: needs --prometheus", exit_codes.USAGE)
        if not places:
            raise _FailureError("name a recording, or a server with --prometheus", exit_codes.USAGE)
        return None
    if places:
        raise _FailureError(f"--prometheus: cannot be combined with {places[0]}", exit_codes.USAGE)
    if options.node is None:
        raise _FailureError("--prometheus: needs --node", exit_codes.USAGE)
    return PrometheusOptions(
        options.prometheus, options.node, options.since, options.step, options.header_file, options.ca_file
    )


def _load_config(path: str | None, *, of_this_node: bool = False, labels: Mapping[str, str] | None = None) -> Any:
    """The configuration. With profiles that of a node with these labels; `of_this_node`: those that the agent of this
    machine saw last."""
    from nodeagent.config import load, problems, show
    from nodeagent.sampling.hostfs.host import open_host

    try:
        loaded = load.load(path, overrides=load.overrides_from(os.environ))
    except problems.ConfigError as error:
        raise _FailureError(str(error), exit_codes.CONFIG) from error
    if labels is not None:
        return load.for_node(loaded, labels)
    if loaded.profiles is not None and of_this_node:
        from nodeagent.commands import host_names, node_labels

        host = open_host("/")
        name = loaded.config.node_name or host_names.host_name(host)
        return node_labels.apply(loaded, host, node_name=name, given=None, api="never")[0]
    if loaded.profiles is not None:
        command = f"nodeagent config show --config {path} --node-labels KEY=VALUE"
        _print_failure(f"{path}: {show.LABELS_UNKNOWN}, so no profile applies; `{command}` prints that of a node")
    return loaded


def _config_show(options: Options) -> int:
    from nodeagent.commands import host_names, node_labels
    from nodeagent.config import above_kubelet, load, problems, show
    from nodeagent.sampling.hostfs.host import Unreadable, open_host
    from nodeagent.sampling.node import kubelet_config

    try:
        loaded = load.load(arguments_common.config_file(options.config), overrides=load.overrides_from(os.environ))
        host = open_host(options.host_root)
        reading = kubelet_config.read_thresholds(host)
    except problems.ConfigError as error:
        raise _FailureError(str(error), exit_codes.CONFIG) from error
    except Unreadable as error:
        raise _FailureError(f"--host-root: {error}", exit_codes.USAGE) from error
    name = loaded.config.node_name or host_names.host_name(host)
    loaded, notes = node_labels.apply(loaded, host, node_name=name, given=options.node_labels)
    loaded = loaded._replace(config=above_kubelet.keep_above(loaded.config, reading.known or ()))
    text = show.show(loaded, notes=(*notes, *(reading.notes if loaded.config.above_kubelet else ())))
    if options.output == "json":
        import json

        import yaml

        text = json.dumps(yaml.safe_load(text), indent=2) + "\n"
    standard_streams.write_output(text)
    return exit_codes.OK


def _config_validate(options: Options) -> int:
    """Print every problem of every file. 0: all files are valid, 1: one is not."""
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
    "demo": _demo,
    "run": _run,
    "snapshot": _snapshot,
    "explain": _explain,
    "replay": _replay,
    "tune": _tune,
    "config show": _config_show,
    "config validate": _config_validate,
    "config schema": _config_schema,
    "completion": _completion,
    "version": _version,
}
