"""From a file, flags and environment to a `Config`, or every reason why not.

`defaults()` is what runs without a file and imports no YAML. `load()` reads one. Both give a `Loaded`: the values,
where each came from, and warnings. Errors are collected, never the first alone, and raised together as one
`ConfigError`.

How thresholds are made: the kubelet's four maps are read as the kubelet reads them. When a file sets evictionHard or
evictionSoft, the built-in thresholds of both maps are gone, so that a kubelet's stanza means what it says;
mergeDefaultEvictionSettings brings the built-in hard ones back for the signals that the file does not name. `signals`
then refines what there is. Not done here, because they need the node: the copies of hard memory.available thresholds
for allocatableMemory.available, and all containerfs thresholds, which follow nodefs or imagefs.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nodeagent.config import defaults as built_in
from nodeagent.config.problems import BUILT_IN, ConfigError, Origin, Problem
from nodeagent.config.schema import API_VERSION, KIND, NODE_NAME, Config, EvictionConfig, Mode, Shape
from nodeagent.config.thresholds import make_thresholds
from nodeagent.runtime import regular_files

if TYPE_CHECKING:
    from nodeagent.config.decode import Reader
    from nodeagent.config.yaml_nodes import YamlNode


class Override(NamedTuple):
    """A value from a flag or the environment, which replaces the file's."""

    key: str
    """`mode`, `nodeName` or `cluster.kubeconfig`."""
    value: str
    origin: Origin


class LoadedConfig(NamedTuple):
    """A configuration that can be used, and where it came from."""

    config: Config
    eviction: EvictionConfig
    """The maps from which `config.thresholds` was made, as they apply: built-in or the file's, merged."""
    origins: Mapping[str, Origin]
    """Key path -> origin, for what did not come from the program itself."""
    warnings: tuple[Problem, ...] = ()

    def origin(self, path: str) -> Origin:
        """Where the value at this key path came from, `evictionHard.memory.available`."""
        return self.origins.get(path, BUILT_IN)


def defaults(*, overrides: Iterable[Override] = ()) -> LoadedConfig:
    """What applies without a file. Raises ConfigError when an override is wrong."""
    eviction = EvictionConfig(
        eviction_hard=built_in.EVICTION_HARD,
        eviction_soft=built_in.EVICTION_SOFT,
        eviction_soft_grace_period=built_in.EVICTION_SOFT_GRACE_PERIOD,
    )
    origins: dict[str, Origin] = {}
    config, problems = _overridden(Config(thresholds=make_thresholds(eviction)), overrides, origins)
    if problems:
        raise ConfigError(tuple(problems))
    return LoadedConfig(config, eviction, origins)


def load(path: str | None, *, overrides: Iterable[Override] = ()) -> LoadedConfig:
    """The file's configuration; `None` is no file. Raises ConfigError with every problem found."""
    if path is None:
        return defaults(overrides=overrides)
    return loads(_read(path), name=path, overrides=overrides)


def load_embedded(path: str) -> Iterator[tuple[str, LoadedConfig | ConfigError | str]]:
    """The configuration in this file, or each one in the ConfigMaps of this manifest: what to call it, and what it says
    or why it cannot be used. Text where there is none to be judged: what the file is."""
    from nodeagent.config import manifest, yaml_nodes

    try:
        raw = _read(path)
        roots = yaml_nodes.parse_all(raw, name=path)
        found = manifest.embedded_configs(roots, raw, name=path)
    except ConfigError as error:
        yield path, error
        return
    if not found:
        yield path, manifest.describe(roots) or _tried(raw, path)
    for each in found:
        result = _tried(each.text, path)
        if isinstance(result, ConfigError):
            result = ConfigError(tuple(map(each.of_file, result.problems)))
        else:
            result = result._replace(warnings=tuple(map(each.of_file, result.warnings)))
        yield f"{path}: {each.place}", result


def _tried(data: bytes | str, name: str) -> LoadedConfig | ConfigError:
    try:
        return loads(data, name=name)
    except ConfigError as error:
        return error


_MENDS: Final[Mapping[type[OSError], str]] = {
    FileNotFoundError: "is the path right?",
    IsADirectoryError: "name a file in it",
    regular_files.NotRegularError: "write the configuration to a file and name that",
}


def _read(path: str) -> bytes:
    """As much of the file as it takes to see that it is too large. Raises ConfigError."""
    from nodeagent.config import yaml_nodes

    try:
        return regular_files.read(path, max_bytes=yaml_nodes.MAX_BYTES + 1)  # it may be a log
    except OSError as error:
        mend = _MENDS.get(type(error), "")
        message = f"cannot be read: {error.strerror or error}"
        raise ConfigError((Problem(Origin(path), "", message, mend),)) from error
    except ValueError as error:  # a null byte in the path
        raise ConfigError((Problem(Origin(repr(path)), "", f"cannot be read: {error}"),)) from error


def loads(data: bytes | str, *, name: str = "<config>", overrides: Iterable[Override] = ()) -> LoadedConfig:
    """The configuration in this YAML text; `name` is what messages call the file. Raises ConfigError."""
    from nodeagent.config import decode, keys, manifest, rules, yaml_nodes

    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    try:
        root = yaml_nodes.parse(raw, name=name)
    except yaml_nodes.SeveralDocumentsError as error:
        raise manifest.refusal(yaml_nodes.parse_all(raw, name=name), raw, name=name) or error from None
    reader = decode.Reader(name)
    if (refusal := manifest.refusal((root,), raw, name=name)) is not None:
        raise refusal
    _check_header(reader, root)
    top = keys.top_level()
    values = decode.read_keys(reader, root, "", top, besides=("apiVersion", "kind"))
    eviction = _effective(values)
    config = _config(values, eviction)
    changed, problems = _overridden(config, overrides, reader.origins)
    problems = [*reader.problems, *rules.errors(config, eviction, origins=reader.origins), *problems]
    if problems:
        raise ConfigError(
            tuple(sorted(problems, key=lambda problem: (problem.origin.line or 0, problem.origin.column or 0)))
        )
    found = rules.warnings(changed, eviction, origins=reader.origins)
    return LoadedConfig(changed, eviction, reader.origins, found)


def overrides_from(
    environ: Mapping[str, str], *, mode: str | None = None, node_name: str | None = None, kubeconfig: str | None = None
) -> tuple[Override, ...]:
    """Overrides from flags, or from the environment where a flag is None; an empty variable counts as unset."""
    flags = (
        ("mode", "--mode", mode, "NODEAGENT_MODE"),
        ("nodeName", "--node-name", node_name, "NODE_NAME"),
        ("cluster.kubeconfig", "--kubeconfig", kubeconfig, "KUBECONFIG"),
    )
    found = []
    for key, flag, value, variable in flags:
        if value is not None:
            found.append(Override(key, value, Origin(flag)))
        elif environ.get(variable):
            found.append(Override(key, environ[variable], Origin(f"${variable}")))
    return tuple(found)


def _overridden(
    config: Config, overrides: Iterable[Override], origins: dict[str, Origin]
) -> tuple[Config, list[Problem]]:
    """The configuration with the overrides, whose origins are added to `origins`, and what is wrong with them."""
    problems = []
    for key, value, origin in overrides:
        origins[key] = origin
        if key == "mode" and value in list(Mode):
            config = config._replace(mode=Mode(value))
        elif key == "mode":
            problems.append(Problem(origin, key, f"{value!r}: must be one of {', '.join(Mode)}"))
        elif key == "nodeName" and value and _matches(NODE_NAME, value):
            config = config._replace(node_name=value)
        elif key == "nodeName":
            problems.append(Problem(origin, key, f"{value!r}: must be {NODE_NAME.says}"))
        elif key == "cluster.kubeconfig" and value and value.isprintable():
            config = config._replace(cluster=config.cluster._replace(kubeconfig=value))
        elif key == "cluster.kubeconfig":
            problems.append(Problem(origin, key, f"{value!r}: must be a path"))
        else:
            raise ValueError(f"{key} cannot be overridden")
    return config, problems


def _check_header(reader: "Reader", root: "YamlNode") -> None:
    """apiVersion and kind. Raises ConfigError at once when this is no map: every other complaint would be noise."""
    from nodeagent.config.decode import quoted
    from nodeagent.config.manifest import HEADER

    if root.tag != "map":
        origin = reader.origin(root)
        raise ConfigError((Problem(origin, "", "the file is not a map of keys", f"begin with {HEADER}"),))
    header = {key.text: (key, value) for key, value in root.items}
    for name, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if name not in header:
            reader.add_problem(root, name, "is missing", f"add `{name}: {wanted}`")
        elif header[name][1].text != wanted:
            node = header[name][1]
            reader.add_problem(node, name, f"{quoted(node.text)} is not known to this version", f"must be {wanted}")


def _effective(values: dict[str, Any]) -> EvictionConfig:
    """The maps as they apply. Takes their fields out of `values`."""
    fields = {field: values.pop(field) for field in EvictionConfig._fields if field in values}
    eviction = EvictionConfig(**fields)
    # As in a kubelet only evictionHard replaces the hard defaults. Soft ones, which a kubelet has none of, give way to
    # either map, so that a pasted stanza means what it says.
    if "eviction_hard" not in fields:
        eviction = eviction._replace(eviction_hard=built_in.EVICTION_HARD)
        if "eviction_soft" not in fields:
            grace = {**built_in.EVICTION_SOFT_GRACE_PERIOD, **eviction.eviction_soft_grace_period}
            eviction = eviction._replace(eviction_soft=built_in.EVICTION_SOFT, eviction_soft_grace_period=grace)
    if eviction.merge_default_eviction_settings:
        eviction = eviction._replace(eviction_hard={**built_in.EVICTION_HARD, **eviction.eviction_hard})
    return eviction


def _config(values: dict[str, Any], eviction: EvictionConfig) -> Config:
    config = Config(**values)
    # The kubelet's rule: a transition period of zero is the default one.
    period_s = config.eviction_pressure_transition_period_s or Config().eviction_pressure_transition_period_s
    return config._replace(
        thresholds=make_thresholds(eviction),
        enforce_node_allocatable="pods" in eviction.enforce_node_allocatable,
        eviction_pressure_transition_period_s=period_s,
    )


def _matches(shape: Shape, value: str) -> bool:
    import re  # not at the top: `nodeagent check` would pay for it

    return re.fullmatch(shape.pattern, value) is not None
