"""Load a `Config` from a file, flags and the environment.

1. `defaults()` needs no file and imports no YAML; `load()` reads a file. Both return a `LoadedConfig`: the values, the
   origin of each, and warnings.
2. All errors of a file are raised together as one `ConfigError`.

The kubelet's four maps are read as the kubelet reads them. evictionHard or evictionSoft in a file removes the built-in
thresholds of evictionSoft, and evictionHard also those of evictionHard, so that a kubelet's stanza keeps its meaning.
mergeDefaultEvictionSettings adds the built-in hard thresholds for the other signals. `signals` then refines the
thresholds. Two steps need the node and happen in `policy.thresholds`: the copies of hard memory.available thresholds
for allocatableMemory.available, and the containerfs thresholds, which follow nodefs or imagefs.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nodeagent.config import bounds, thresholds
from nodeagent.config import defaults as built_in
from nodeagent.config.problems import BUILT_IN, ConfigError, Origin, Problem
from nodeagent.config.schema import API_VERSION, CONFIG_KIND, Config, EvictionConfig, Mode
from nodeagent.runtime import regular_files

if TYPE_CHECKING:
    from nodeagent.config.decode import Reader
    from nodeagent.config.profiles import ProfileSource
    from nodeagent.config.yaml_nodes import YamlNode


class Override(NamedTuple):
    """A value from a flag or the environment, which replaces the file's."""

    key: str
    """`mode`, `nodeName` or `cluster.kubeconfig`."""
    value: str
    origin: Origin


class LoadedConfig(NamedTuple):
    """A valid configuration with the origins of its values."""

    config: Config
    eviction: EvictionConfig
    """The effective maps that became `config.thresholds`: built-in or the file's, merged."""
    origins: Mapping[str, Origin]
    """Key path -> origin, for values that are not built in."""
    warnings: tuple[Problem, ...] = ()
    profiles: "ProfilesOfFile | None" = None
    """What `for_node` needs; None in a file without profiles."""
    active: tuple[str, ...] | None = None
    """The profiles that apply to the node, in the order of the file. None: its labels are not known."""

    def origin(self, path: str) -> Origin:
        """The origin of the value at this key path, `evictionHard.memory.available`."""
        return self.origins.get(path, BUILT_IN)


class ProfilesOfFile(NamedTuple):
    """The profiles of a valid file and the file itself."""

    sources: "tuple[ProfileSource, ...]"
    root: "YamlNode"
    base: LoadedConfig
    """The configuration of a node that no profile matches."""
    overrides: tuple[Override, ...]
    may_enforce: bool
    """On some node the mode is `enforce`."""


def defaults(*, overrides: Iterable[Override] = ()) -> LoadedConfig:
    """The configuration without a file. Raises ConfigError if an override is wrong."""
    eviction = EvictionConfig(
        eviction_hard=built_in.EVICTION_HARD,
        eviction_soft=built_in.EVICTION_SOFT,
        eviction_soft_grace_period=built_in.EVICTION_SOFT_GRACE_PERIOD,
    )
    origins: dict[str, Origin] = {}
    model = thresholds.default_memory_model(Config().ranking)
    made = thresholds.make_thresholds(eviction, memory_model=model)
    config, problems = _overridden(Config(thresholds=made), overrides, origins)
    if problems:
        raise ConfigError(tuple(problems))
    return LoadedConfig(config, eviction, origins)


def load(path: str | None, *, overrides: Iterable[Override] = ()) -> LoadedConfig:
    """The configuration of the file; with None the built-in one. Raises ConfigError with every problem."""
    if path is None:
        return defaults(overrides=overrides)
    return loads(_read(path), name=path, overrides=overrides)


def load_embedded(path: str) -> Iterator[tuple[str, LoadedConfig | ConfigError | str]]:
    """The configuration in this file, or each one in the ConfigMaps of this manifest, with its name for messages. The
    result is a text that describes the file if it contains no configuration."""
    from nodeagent.config import manifest, yaml_nodes

    try:
        raw = _read(path)
        roots = yaml_nodes.parse_all(raw, name=path)
        found = manifest.embedded_configs(roots, raw, name=path)
    except ConfigError as error:
        yield path, error
        return
    if not found:
        yield path, manifest.describe_objects(roots) or _load_or_error(raw, path)
    for each in found:
        result = _load_or_error(each.text, path)
        if isinstance(result, ConfigError):
            result = ConfigError(tuple(map(each.of_file, result.problems)))
        else:
            result = result._replace(warnings=tuple(map(each.of_file, result.warnings)))
        yield f"{path}: {each.place}", result


def _load_or_error(data: bytes | str, name: str) -> LoadedConfig | ConfigError:
    try:
        return loads(data, name=name)
    except ConfigError as error:
        return error


_FIXES: Final[Mapping[type[OSError], str]] = {
    FileNotFoundError: "is the path right?",
    IsADirectoryError: "name a file in it",
    regular_files.NotRegularError: "write the configuration to a file and name that",
}


def _read(path: str) -> bytes:
    """Read at most one byte more than the limit. Raises ConfigError."""
    from nodeagent.config import yaml_nodes

    try:
        return regular_files.read_file(path, max_bytes=yaml_nodes.MAX_CONFIG_BYTES + 1)  # it may be a log
    except OSError as error:
        fix = _FIXES.get(type(error), "")
        message = f"cannot be read: {error.strerror or error}"
        raise ConfigError((Problem(Origin(path), "", message, fix),)) from error
    except ValueError as error:  # a null byte in the path
        raise ConfigError((Problem(Origin(repr(path)), "", f"cannot be read: {error}"),)) from error


def loads(data: bytes | str, *, name: str = "<config>", overrides: Iterable[Override] = ()) -> LoadedConfig:
    """The configuration in this YAML text; messages call the file `name`. Raises ConfigError."""
    from nodeagent.config import decode, manifest, profiles, yaml_nodes

    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    try:
        root = yaml_nodes.parse(raw, name=name)
    except yaml_nodes.SeveralDocumentsError as error:
        raise manifest.not_a_config(yaml_nodes.parse_all(raw, name=name), raw, name=name) or error from None
    overrides, reader = tuple(overrides), decode.Reader(name)
    if (rejection := manifest.not_a_config((root,), raw, name=name)) is not None:
        raise rejection
    _check_header(reader, root)
    base, problems = _decode(root, reader, overrides)
    if any(key.text == profiles.KEY for key, _ in root.items):
        base, found = _with_profiles(base, root, name, overrides, known=frozenset(problems))
        problems += found
    if problems:
        raise ConfigError(
            tuple(sorted(problems, key=lambda problem: (problem.origin.line or 0, problem.origin.column or 0)))
        )
    return base


def for_node(loaded: LoadedConfig, labels: Mapping[str, str] | None) -> LoadedConfig:
    """The configuration of a node with these labels. None: they are not known. Then the file applies without its
    profiles and as a dry run, because the profile of this node may be more cautious."""
    file = loaded.profiles
    if file is None:
        return loaded
    from nodeagent.config import decode, profiles

    if labels is None:
        config, origins = file.base.config, file.base.origins
        if config.mode is Mode.ENFORCE:
            config = config._replace(mode=Mode.DRY_RUN)
            origins = {**origins, "mode": Origin("labels of the node not known")}
        return file.base._replace(config=config, origins=origins, profiles=file, active=None)
    matched = profiles.matching(file.sources, labels)
    result = file.base
    if matched:
        reader = decode.Reader(file.root.text)
        result, problems = _decode(profiles.merged(file.root, matched), reader, file.overrides, base=file.base)
        if problems:  # no set of profiles that can match together has any
            raise ConfigError(tuple(problems))
    return result._replace(profiles=file, active=tuple(each.name for each in matched))


def may_enforce(loaded: LoadedConfig) -> bool:
    """Whether the mode is `enforce`, or can become so with other labels of the node."""
    return loaded.config.mode is Mode.ENFORCE or (loaded.profiles is not None and loaded.profiles.may_enforce)


def _decode(
    root: "YamlNode", reader: "Reader", overrides: tuple[Override, ...], *, base: LoadedConfig | None = None
) -> tuple[LoadedConfig, list[Problem]]:
    """The configuration of this tree and its errors. `base`: that of the file without profiles, if `root` has the
    overrides of some."""
    from nodeagent.config import decode, keys, rules

    values = decode.read_keys(reader, root, "", keys.top_level(), read_elsewhere=("apiVersion", "kind"))
    eviction = _effective(values, base.eviction if base is not None else None)
    config = _config(values, eviction)
    changed, wrong = _overridden(config, overrides, reader.origins)
    problems = [*reader.problems, *rules.errors(config, eviction, origins=reader.origins), *wrong]
    warnings = () if problems else rules.warnings(changed, eviction, origins=reader.origins)
    if base is not None:
        changed = changed._replace(profiles=base.config.profiles)
    return LoadedConfig(changed, eviction, reader.origins, warnings), problems


def _with_profiles(
    base: LoadedConfig, root: "YamlNode", name: str, overrides: tuple[Override, ...], *, known: frozenset[Problem]
) -> tuple[LoadedConfig, list[Problem]]:
    """The configuration with its profiles, each of them validated, and every set of them that can match one node.
    `known`: the problems of the file without its profiles, which are not repeated."""
    from nodeagent.config import decode, profiles

    root = root._replace(text=name)
    sources = profiles.sources(root)[: profiles.MAX_PROFILES]
    matches: list[tuple[ProfileSource, ...]] = [(source,) for source in sources]
    problems: list[Problem] = []
    try:
        matches += profiles.combinations(sources) if not known else ()
    except profiles.TooManyError:
        message = f"more than {profiles.MAX_COMBINATIONS} sets of profiles can match one node together"
        fix = "use fewer different labels in their selectors"
        problems.append(Problem(base.origin("profiles"), "profiles", message, fix))
    if root.size * len(matches) > profiles.MAX_DECODED:
        message = f"too many for a file of this size: each of {len(matches)} sets of profiles is validated with it"
        problems.append(
            Problem(base.origin("profiles"), "profiles", message, "shorten the file, or use fewer profiles")
        )
        matches = []
    warnings, enforces, reported = list(base.warnings), base.config.mode is Mode.ENFORCE, {*known, *base.warnings}
    for matched in matches:
        decoded, wrong = _decode(profiles.merged(root, matched), decode.Reader(name), overrides, base=base)
        problems += [_in_profile(each, matched, name) for each in wrong if each not in reported]
        warnings += [_in_profile(each, matched, name) for each in decoded.warnings if each not in reported]
        if len(matched) == 1:  # what a profile alone causes is not repeated for each set with it
            reported.update(wrong, decoded.warnings)
        enforces = enforces or decoded.config.mode is Mode.ENFORCE
    for override in overrides:
        if override.key == "mode":
            message = f"has no effect: {override.origin} sets the mode of every node"
            nodes = ((each, profiles.value_of(each.overrides, "mode")) for each in sources)
            places = ((each, Origin(name, node.line, node.column)) for each, node in nodes if node is not None)
            warnings += [Problem(place, f"profiles[{each.place}].mode", message) for each, place in places]
    file = ProfilesOfFile(sources, root, base, overrides, enforces)
    return base._replace(warnings=tuple(warnings), profiles=file if sources else None), problems


def _in_profile(problem: Problem, matched: "tuple[ProfileSource, ...]", name: str) -> Problem:
    """The problem of a configuration with these profiles, with the path of the key in its profile. A problem in a key
    of the file itself, which only appears with the profiles, gets the place of the last one."""
    names = ", ".join(each.name for each in matched)
    if len(matched) > 1:
        problem = problem._replace(message=f"{problem.message} (on a node with the profiles {names})")
    for source in matched:
        if problem.origin.profile == source.name:
            return problem._replace(key=f"profiles[{source.place}].{problem.key}")
    last = matched[-1]
    message = f"{problem.key}: {problem.message}" + (f" (with profile {names})" if len(matched) == 1 else "")
    origin = Origin(name, last.overrides.line, last.overrides.column)
    return problem._replace(origin=origin, key=f"profiles[{last.place}]", message=message)


def overrides_from(
    environ: Mapping[str, str], *, mode: str | None = None, node_name: str | None = None, kubeconfig: str | None = None
) -> tuple[Override, ...]:
    """Overrides from flags; from the environment if a flag is None. An empty variable counts as unset."""
    flags = (
        ("mode", "--dry-run", mode, "NODEAGENT_MODE"),
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
    """The configuration with the overrides, and their problems. Adds the origins to `origins`."""
    problems = []
    for key, value, origin in overrides:
        origins[key] = origin
        if key == "mode" and value in list(Mode):
            config = config._replace(mode=Mode(value))
        elif key == "mode":
            problems.append(Problem(origin, key, f"{value!r}: must be one of {', '.join(Mode)}"))
        elif key == "nodeName" and value and _matches(bounds.NODE_NAME, value):
            config = config._replace(node_name=value)
        elif key == "nodeName":
            problems.append(Problem(origin, key, f"{value!r}: must be {bounds.NODE_NAME.description}"))
        elif key == "cluster.kubeconfig" and value and value.isprintable():
            config = config._replace(cluster=config.cluster._replace(kubeconfig=value))
        elif key == "cluster.kubeconfig":
            problems.append(Problem(origin, key, f"{value!r}: must be a path"))
        else:
            raise ValueError(f"{key} cannot be overridden")
    return config, problems


def _check_header(reader: "Reader", root: "YamlNode") -> None:
    """Check apiVersion and kind. Raises ConfigError if the root is no map, because further problems would not help."""
    from nodeagent.config import decode, manifest

    if root.tag != "map":
        origin = reader.origin(root)
        raise ConfigError((Problem(origin, "", "the file is not a map of keys", f"begin with {manifest.HEADER}"),))
    header = {key.text: (key, value) for key, value in root.items}
    for name, wanted in (("apiVersion", API_VERSION), ("kind", CONFIG_KIND)):
        if name not in header:
            reader.add_problem(root, name, "is missing", f"add `{name}: {wanted}`")
        elif header[name][1].text != wanted:
            node = header[name][1]
            reader.add_problem(
                node, name, f"{decode.quoted(node.text)} is not known to this version", f"must be {wanted}"
            )


def _effective(values: dict[str, Any], base: EvictionConfig | None = None) -> EvictionConfig:
    """The effective maps. Removes their fields from `values`. `base`: those of the file, to which profiles add single
    signals: a profile with evictionHard removes no built-in threshold."""
    fields = {field: values.pop(field) for field in EvictionConfig._fields if field in values}
    eviction = EvictionConfig(**fields)
    if base is not None:
        hard = {**base.eviction_hard, **eviction.eviction_hard}
        return eviction._replace(
            eviction_hard={**built_in.EVICTION_HARD, **hard} if eviction.merge_default_eviction_settings else hard,
            eviction_soft={**base.eviction_soft, **eviction.eviction_soft},
            eviction_soft_grace_period={**base.eviction_soft_grace_period, **eviction.eviction_soft_grace_period},
        )
    # As in the kubelet, only evictionHard replaces the hard defaults. Either map replaces the soft defaults, which the
    # kubelet does not have, so that a pasted stanza keeps its meaning.
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
    model = thresholds.default_memory_model(config.ranking)
    return config._replace(
        thresholds=thresholds.make_thresholds(eviction, memory_model=model),
        enforce_node_allocatable="pods" in eviction.enforce_node_allocatable,
        eviction_pressure_transition_period_s=period_s,
    )


def _matches(shape: bounds.Shape, value: str) -> bool:
    import re  # not at the top: `nodeagent check` does not need it

    return re.fullmatch(shape.pattern, value) is not None
