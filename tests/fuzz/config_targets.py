"""Parsers of quantities, durations and YAML."""

import tempfile
from pathlib import Path
from typing import Final

from nodeagent.config import amount, config_file, duration, k3s, kubelet, kubelet_excerpt, load, quantity, show
from nodeagent.config.bounds import AmountRule
from nodeagent.config.load import Override
from nodeagent.config.problems import ConfigError, Origin
from tests.fuzz import scratch
from tests.fuzz.engine import Target
from tests.support.paths import REPOSITORY

_HEADER: Final = b"apiVersion: nodeagent.io/v1alpha1\nkind: NodeAgentConfiguration\n"
_directory = tempfile.TemporaryDirectory(dir=scratch.PARENT)
_file = Path(_directory.name) / "config.yaml"


def _quantity(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    whole = quantity.parse_quantity(text)
    assert abs(whole) <= quantity.MAX_QUANTITY
    milli = quantity.parse_milli(text)
    assert abs(milli) >= abs(whole) or abs(milli) == quantity.MAX_QUANTITY


def _duration(data: bytes) -> None:
    seconds = duration.parse_duration(data.decode("utf-8", "surrogateescape"))
    assert duration.parse_duration(duration.format_duration(seconds)) == seconds


def _amount(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    for rule in AmountRule:
        try:
            found = amount.parse_amount(text, rule=rule)
            assert (found.quantity is None) != (found.percentage is None)
        except ValueError:
            continue
    amount.parse_threshold(text)


def _configuration(data: bytes) -> None:
    try:
        loaded = load.loads(data, name="config.yaml")
    except ConfigError as error:
        show.explain_problems(error)
        raise
    again = load.loads(show.show(loaded), name="shown")
    assert again.config == show.without_secrets(loaded).config._replace(profiles=()), "profiles are in the values"
    show.explain_warnings(loaded)
    assert config_file.config_changes(loaded, loaded) == ()


def _manifest(data: bytes) -> None:
    _file.write_bytes(data)
    for _, found in load.load_embedded(str(_file)):
        assert isinstance(found, load.LoadedConfig | ConfigError | str)


def _kubelet(data: bytes) -> None:
    text, _, flags = data.decode("utf-8", "surrogateescape").partition("\0")
    words = flags.split("\0")
    settings = kubelet.read_settings(text, drop_ins=[("a", text), ("b", flags)], flags=words)
    kubelet.describe_thresholds(settings.thresholds)
    kubelet.find_earlier_thresholds(load.defaults().config.thresholds, settings.thresholds, capacities={})
    settings_of_k3s = k3s.read_settings(words)
    kubelet.read_settings(flags=k3s.without_drop_ins(settings_of_k3s))
    kubelet_excerpt.excerpt([("a", text)], words)


def _environment(data: bytes) -> None:
    """What a variable or an option sets, such as $NODEAGENT_MODE."""
    value = data.decode("utf-8", "surrogateescape")
    for key in ("mode", "nodeName", "cluster.kubeconfig"):
        try:
            load.defaults(overrides=[Override(key, value, Origin("$X"))])
        except ConfigError as error:
            show.explain_problems(error)


def _sections(text: bytes) -> list[bytes]:
    """Each top-level key of a configuration with its value, and the header: a small file is parsed more often."""
    lines = [line for line in text.split(b"\n") if line.strip() and not line.lstrip().startswith(b"#")]
    starts = [number for number, line in enumerate(lines) if line[:1].isalpha()]
    parts = [b"\n".join(lines[begin:end]) for begin, end in zip(starts, [*starts[1:], len(lines)], strict=True)]
    return [_HEADER + part + b"\n" for part in parts if not part.startswith((b"apiVersion", b"kind"))]


_EXAMPLES: Final = {
    section.removeprefix(_HEADER).partition(b":")[0]: section
    for path in sorted((REPOSITORY / "examples").glob("*.yaml"))
    for section in _sections(path.read_bytes())
}
"""One for each key."""
_KUBELETS: Final = tuple([path.read_bytes() for path in sorted((REPOSITORY / "tests/data/kubelet").glob("*.yaml"))])
_TOKENS: Final = (
    b"&a ",
    b"*a",
    b"<<: ",
    b"!!binary ",
    b"? ",
    b"| \n",
    b"--- \n",
    b"%YAML 1.2\n",
    b"{a: b}",
    b"'",
    b"5%",
    b"100Mi",
    b"evictionHard:\n  memory.available: 5%\n",
    b"evictionSoft: {memory.available: 1Gi}\n",
    b"rateLimits:\n  node: {burst: 3, perHour: 6}\n",
    b"ranking: {order: kubelet}\n",
)

TARGETS: Final = (
    Target(
        "quantities",
        _quantity,
        (ValueError,),
        seeds=(b"100Mi", b"1.5Gi", b"250m", b"1e9", b"-1n", b"+.5E", b"9223372036854775807", b"1E-3"),
        tokens=(b"Ki", b"Mi", b"e", b"E", b".", b"n", b"m", b"-", b"e999999999"),
    ),
    Target(
        "durations",
        _duration,
        (ValueError,),
        seeds=(b"1m30s", b"1.5h", b"300ms", b"0", b"-1us", b"\xc2\xb5s", b"2562047h47m16.854775807s"),
        tokens=(b"h", b"ms", b"ns", b".", b"-", b"\xce\xbcs"),
    ),
    Target(
        "amounts",
        _amount,
        (ValueError,),
        seeds=(b"5%", b"2%, at least 200Mi, at most 1Gi", b"100Mi", b"100.000001%", b"1e1%"),
        tokens=(b", at least ", b", at most ", b"%", b"e", b"1Ti"),
    ),
    Target("configuration", _configuration, (ConfigError,), seeds=(_HEADER, *_EXAMPLES.values()), tokens=_TOKENS),
    Target(
        "manifests",
        _manifest,
        seeds=(
            b"kind: ConfigMap\nmetadata: {name: a}\ndata:\n  config.yaml: |\n    "
            + _HEADER.replace(b"\n", b"\n    ")
            + b"\n---\nkind: List\nitems: [{kind: ConfigMap}]\n",
            _HEADER,
            b"- {op: add, path: /a}\n",
        ),
        tokens=(*_TOKENS, b"kind: List\n", b"items:\n", b"NodeAgentConfiguration"),
    ),
    Target(
        "kubelet-settings", _kubelet, seeds=(*_KUBELETS, b"\x00--eviction-hard=memory.available<5%\x00"), tokens=_TOKENS
    ),
    Target(
        "overrides",
        _environment,
        seeds=(b"enforce", b"node-1.example", b"/etc/kubeconfig"),
        tokens=(b".", b"-", b"dry-run"),
    ),
)
