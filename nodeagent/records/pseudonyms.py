"""Replaces the names in recorded values by pseudonyms, so that a snapshot file can be given to others.

Promises:

1. The same name has the same pseudonym everywhere in one file. It is a keyed hash; the key is random, lives in this
   process only and is stored nowhere, so that two files cannot be compared and no name can be tried.
2. A field that holds a name is replaced as a whole: pods, namespaces, owners, containers, images, volumes, claims,
   budgets, priority classes, labels, annotations, nodes, UIDs, container ids.
3. In every other text all known names are replaced, and then every word that is not in nodeagent's own vocabulary: what
   is not known to be harmless is replaced. A word that joins letters and digits is a name even if its parts are not.
4. Numbers, quantities, times, states, reasons and ids of decisions stay, so that the file can be explained and
   replayed. Where the policy compares names (ties in the ranking), a replay may decide otherwise.

Theory of operation. `Pseudonyms` first reads everything (`learn`), because a text may mention a pod of a later sample,
and then rewrites it. How a type is rewritten is derived once from its annotations (`_rewriter`): only fields that can
contain text are touched. The vocabulary is every word in the source of this package, which contains each message.
"""

import enum
import errno
import functools
import hashlib
import ipaddress
import os
import re
import secrets
import types
import typing
from collections.abc import Callable, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Final

from nodeagent.config import keys
from nodeagent.model import Pod, RecordedSample, RecordingHeader
from nodeagent.records.flight_recorder import DecisionInputs, Packer

STANDARD_NAMES: Final = frozenset(
    {
        "default",
        "kube-system",
        "kube-public",
        "kube-node-lease",
        "nodeagent",
        "system-cluster-critical",
        "system-node-critical",
        "true",
        "false",
    }
)
"""Names that every cluster has, which tell nothing: they stay."""
STANDARD_KEYS: Final = re.compile(r"(?:nodeagent\.io|controller\.kubernetes\.io|cluster-autoscaler\.kubernetes\.io)/.*")
"""Keys of annotations and labels that the policy reads by name: they stay, their values do not."""
MAX_REMEMBERED: Final = 100_000
"""Texts whose result is kept: messages repeat from sample to sample."""
HASH_CHARS: Final = 8

_KEEP: Final = "keep"
_TEXT: Final = "text"
_UID: Final = "uid"
_KINDS: Final[Mapping[str, Mapping[str, str]]] = {
    "Pod": {"uid": _UID, "cgroup_uid": _UID, "mirror_of": _UID, "name": "pod", "namespace": "namespace",
            "priority_class": "priorityclass", "resource_version": _KEEP, "claims": "claim", "phase": _KEEP},
    "PodUsage": {"cgroup_uid": _UID},
    "Owner": {"name": "owner", "uid": _UID},
    "Container": {"name": "container", "container_id": _UID, "image_names": "image"},
    "ContainerUsage": {"name": "container", "container_id": _UID},
    "OwnLimit": {"container_id": _UID},
    "EmptyDir": {"name": "volume"},
    "VolumeUsage": {"name": "volume"},
    "DisruptionBudget": {"name": "budget"},
    "NodeFit": {"node": "node"},
    "NodeSnapshot": {"node": "node", "own_pod_uid": _UID},
    "RecordedSample": {"plan_id": _KEEP},
    "RecordingHeader": {"node": "node", "version": _KEEP, "instance": _KEEP, "kernel": _KEEP},
    "PolicyState": {"instance": _KEEP},
    "ConditionState": {"seed": "node"},
    "ThresholdState": {"first_observed": _KEEP, "past_grace": _KEEP, "read_at": _KEEP, "good_samples": _KEEP,
                       "unknown_since": _KEEP, "history": _KEEP, "used_up_since": _KEEP},
    "GrowthState": {"used": _UID, "walks": _UID},
    "InFlightEviction": {"plan_id": _KEEP, "pod_uid": _UID, "cgroup_uid": _UID},
    "InFlightState": {"departing": _UID},
    "Replacements": {"plan_id": _KEEP},
    "ReclaimRun": {"plan_id": _KEEP},
    "HookState": {"runs": _UID},
    "HookRun": {"plan_id": _KEEP},
    "ResizeState": {"entries": _UID},
    "PodResize": {"plan_id": _KEEP, "pod_uid": _UID, "namespace": "namespace", "name": "pod", "container": "container"},
    "ReliefReport": {"plan_id": _KEEP, "pod_uids": _UID},
    "Amount": {"text": _KEEP},
    "ZombieHolder": {"pod_uid": _UID},
}  # fmt: skip
"""What the text fields of a type hold, also as keys of a map; all others hold free text."""
_JSON_KINDS: Final[Mapping[str, str]] = {
    "id": _KEEP,
    "planId": _KEEP,
    "record": _KEEP,
    "uid": _UID,
    "podUid": _UID,
    "podUids": _UID,
    "cgroupUid": _UID,
    "containerId": _UID,
    "namespace": "namespace",
    "container": "container",
    "signal": _KEEP,
    "rankedFor": _KEEP,
    "rankOrder": _KEEP,
    "code": _KEEP,
    "kernel": _KEEP,
    "status": _KEEP,
    "method": _KEEP,
    "tier": _KEEP,
    "type": _KEEP,
    "state": _KEEP,
    "shape": _KEEP,
    "text": _TEXT,
}
"""The same for the keys of a record. `name` is a pod beside a namespace, and free text elsewhere."""

_ID: Final = re.compile(
    r"[0-9a-f]{8}([-_])[0-9a-f]{4}\1[0-9a-f]{4}\1[0-9a-f]{4}\1[0-9a-f]{12}|(?<![0-9a-f])[0-9a-f]{32,64}(?![0-9a-f])"
)
"""A UID, also as in the name of a cgroup, a hash of a static pod or the id of a container."""
_ADDRESS: Final = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
_DASHED_ADDRESS: Final = re.compile(r"\d{1,3}(?:-\d{1,3}){3}", re.ASCII)
_COLONS: Final = re.compile(r"(?<!\w)(?=[0-9A-Fa-f]*:[0-9A-Fa-f]*:)[0-9A-Fa-f:.]+", re.ASCII)
"""An IPv6 address, or a time."""
_WORDS: Final = re.compile(r"\w+(?:[-._]+\w+)*")
_NUMBER: Final = re.compile(
    r"(?:\d+(?:e[+-]?\d+)?(?:[KMGTPE]i?B?|[munµ]?s|[mhdx]|B)?)+|\d+T\d+Z?|\d+Z|0x[0-9a-f]+|v\d+(?:(?:alpha|beta)\d+)?",
    re.ASCII,
)
_STANDARD_WORDS: Final = frozenset({"utf-8", "avg10", "avg60", "avg300"})
"""Words of letters and numbers that messages and the configuration have."""
_MARK: Final = "\ue000"
_PART: Final = re.compile(r"[-._]+")
_SEPARATED: Final = re.compile(r"([-._]*)([^-._]+)")
_PLAIN: Final = re.compile(r"[A-Za-z]+")


class Pseudonyms:
    """The pseudonyms of one file."""

    def __init__(self, *, key: bytes | None = None) -> None:
        """`key` is for tests; by default it is random."""
        self._key = secrets.token_bytes(32) if key is None else key
        self._known: dict[str, str] = {}
        """Pseudonyms by name, for texts."""
        self._texts: dict[str, str] = {}
        self._pods: dict[int, tuple[Pod, Pod]] = {}
        """By identity: the pods of one sample are mostly those of the one before."""
        self._learning = False
        self._vocabulary = _vocabulary()
        self._packer = Packer()
        self._header = self._rewriter(RecordingHeader, _TEXT)
        self._sample = self._rewriter(RecordedSample, _TEXT)
        self._inputs = self._rewriter(DecisionInputs, _TEXT)

    def learn(self) -> "Pseudonyms":
        """Only read names from now on, until `replace`: the results of the other methods are not to be used."""
        self._learning = True
        return self

    def replace(self) -> "Pseudonyms":
        """Replace names from now on."""
        self._learning = False
        self._texts.clear()
        self._pods.clear()
        return self

    # --- values

    def header(self, header: RecordingHeader) -> RecordingHeader:
        """The header with pseudonyms."""
        return typing.cast("RecordingHeader", self._apply(self._header, header))

    def sample(self, sample: RecordedSample) -> RecordedSample:
        """The sample with pseudonyms."""
        return typing.cast("RecordedSample", self._apply(self._sample, sample))

    def record(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """A record of the flight recorder with pseudonyms. Inputs of another version are dropped: they cannot be read,
        and so not be rewritten."""
        rest = {key: value for key, value in record.items() if key != "inputs"}
        rewritten: dict[str, Any] = self._json(rest, "")
        unpacked = self._packer.unpack(record.get("inputs"))
        if unpacked.inputs is not None:
            inputs = self._apply(self._inputs, unpacked.inputs)
            if not self._learning:
                rewritten["inputs"] = self._packer.pack(inputs)
        return rewritten

    def object(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """An object of JSON with pseudonyms."""
        rewritten: dict[str, Any] = self._json(value, "")
        return rewritten

    def name(self, kind: str, name: str) -> str:
        """The pseudonym of a name of this kind: `pod-1a2b3c4d`."""
        if not name or name in STANDARD_NAMES:
            return name
        pseudonym = self._known.get(name)
        if pseudonym is None:
            pseudonym = f"{kind}-{self._hash(name, HASH_CHARS)}"
            self._known[name] = pseudonym
        elif not pseudonym.startswith(f"{kind}-"):
            return f"{kind}-{self._hash(name, HASH_CHARS)}"
        return pseudonym

    def text(self, text: str) -> str:
        """A text with pseudonyms for every name in it."""
        if self._learning or not text:
            return text
        done = self._texts.get(text)
        if done is None:
            if len(self._texts) >= MAX_REMEMBERED:
                self._texts.clear()
            done = self._texts[text] = self._rewritten(text)
        return done

    # --- words

    def _hash(self, text: str, chars: int) -> str:
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=self._key, digest_size=32).hexdigest()
        return digest[:chars]

    def _uid(self, uid: str) -> str:
        if not uid:
            return uid
        found = _ID.fullmatch(uid)
        return self._other_id(found) if found else self.name(_UID, uid)

    def _other_id(self, found: re.Match[str]) -> str:
        """Another id of the same form. The UID of a pod has hyphens in the API and underscores in a cgroup's name."""
        digits = iter(self._hash(re.sub("[-_]", "", found[0]), 64))
        return "".join([each if each in "-_" else next(digits) for each in found[0]])

    def _rewritten(self, text: str) -> str:
        ids: list[str] = []

        def mark(new: str) -> str:
            ids.append(new)
            return f"{_MARK}{len(ids) - 1}{_MARK}"

        text = text.replace(_MARK, "")
        text = _ID.sub(lambda found: mark(self._other_id(found)), text)
        text = _COLONS.sub(lambda found: self._colons(found[0], mark), text)
        text = _ADDRESS.sub(lambda found: mark(self._address(found[0])), text)
        pieces = text.split(_MARK)
        # Every second piece is the number of an id.
        return "".join(
            [ids[int(piece)] if place % 2 else _WORDS.sub(self._word, piece) for place, piece in enumerate(pieces)]
        )

    def _colons(self, text: str, mark: Callable[[str], str]) -> str:
        """An IPv6 address, also one before a colon or at the end of a sentence, or the same text. The loopback and the
        unspecified address stay: every node has them, and the configuration stays valid."""
        for end in (len(text), len(text.rstrip(".:"))):
            try:
                address = ipaddress.IPv6Address(text[:end])
            except ValueError:
                continue
            if not (address.is_loopback or address.is_unspecified):
                return mark(self._address(text[:end])) + text[end:]
            return text
        return text

    def _address(self, address: str) -> str:
        return self._known.get(address) or f"address-{self._hash(address, HASH_CHARS)}"

    def _word(self, found: re.Match[str]) -> str:
        """One word, which may have parts: `web-5d4f-x2.slice`."""
        word = found[0]
        if (known := self._known.get(word)) is not None:
            return known
        kind = "path" if found.start() and found.string[found.start() - 1] == "/" else "name"
        starts = [0, *[each.end() for each in _PART.finditer(word)]]
        ends = [*[each.start() for each in _PART.finditer(word)], len(word)]
        result, place, parts, unknown = "", 0, len(starts), 0
        while place < parts:
            for end in range(parts, place, -1):  # the longest known name
                if (known := self._known.get(word[starts[place] : ends[end - 1]])) is not None:
                    result += self._unknown(word[unknown : starts[place]], kind) + known
                    unknown, place = ends[end - 1], end
                    break
            else:
                place += 1
        return result + self._unknown(word[unknown:], kind)

    def _unknown(self, text: str, kind: str) -> str:
        """What no known name covers, with what separates it from that. With letters and digits it is one name, such as
        `ip-10-0-3-18` and `worker-3`, whose parts may be harmless; else the parts that nobody knows are."""
        name = text.strip("-._")
        if not name or name.lower() in _STANDARD_WORDS:
            return text
        before, _, after = text.partition(name)
        numbers = [_NUMBER.fullmatch(each) is not None for each in _PART.split(name)]
        if _DASHED_ADDRESS.fullmatch(name):
            return before + self._address(name) + after
        if any(each.isdigit() for each in name) and not all(numbers):
            return f"{before}{self._hashed(name, kind)}{after}"
        result, unknown = "", ""
        for separator, part in _SEPARATED.findall(name):
            if self._harmless(part):
                result, unknown = result + self._hashed(unknown, kind) + separator + part, ""
            elif unknown:
                unknown += separator + part
            else:
                result, unknown = result + separator, part
        return before + result + self._hashed(unknown, kind) + after

    def _hashed(self, name: str, kind: str) -> str:
        return f"{kind}-{self._hash(name, HASH_CHARS)}" if name else ""

    def _harmless(self, part: str) -> bool:
        return part.lower() in self._vocabulary or _NUMBER.fullmatch(part) is not None

    # --- JSON

    def _json(self, value: Any, kind: str) -> Any:
        if isinstance(value, str):
            return self._string(value, kind or _TEXT)
        if isinstance(value, list | tuple):
            return [self._json(item, kind) for item in value]
        if isinstance(value, Mapping):
            return {key: self._member(key, item, value) for key, item in value.items()}
        return value

    def _member(self, key: str, item: Any, around: Mapping[str, Any]) -> Any:
        if key == "name" and isinstance(item, str) and "namespace" in around:
            return self.name("pod", item)
        if key == "owner" and isinstance(item, str):
            kind, slash, name = item.partition("/")
            return f"{self.text(kind)}/{self.name('owner', name)}" if slash else self.name("owner", item)
        if key in ("labels", "annotations") and isinstance(item, Mapping):
            return self._labels(item)
        return self._json(item, _JSON_KINDS.get(key, _TEXT))

    def _string(self, text: str, kind: str) -> str:
        if kind == _KEEP:
            if self._learning:
                self._known.setdefault(text, text)  # an id of a decision in a text
            return text
        if kind == _UID:
            return self._uid(text)
        return self.text(text) if kind == _TEXT else self.name(kind, text)

    def _labels(self, labels: Mapping[str, str]) -> dict[str, str]:
        """Labels or annotations. Those of an eviction (`offending_containers`) have no prefix and a meaning."""
        rewritten = {}
        for key, value in labels.items():
            if STANDARD_KEYS.fullmatch(key) or key in _EVICTION_KEYS:
                rewritten[key] = self.text(value)
            else:
                # The parts of a key are words of their own in a text, such as the configuration.
                rewritten["/".join([self.name("label", part) for part in key.split("/")])] = self.name("value", value)
        return rewritten

    # --- types

    def _apply(self, rewrite: "Rewrite | None", value: Any) -> Any:
        return value if rewrite is None else rewrite(value)

    def _rewriter(self, type_: Any, kind: str) -> "Rewrite | None":
        """How values of this type are rewritten; None if they contain no text."""
        if type_ is str:
            return lambda text: self._string(text, kind)
        if isinstance(type_, type) and issubclass(type_, enum.Enum):
            return None
        if isinstance(type_, type) and hasattr(type_, "_fields"):
            return self._tuple_rewriter(type_)
        origin, arguments = typing.get_origin(type_), typing.get_args(type_)
        if origin is typing.Annotated:
            return self._rewriter(arguments[0], kind)
        if origin in (typing.Union, types.UnionType):
            return self._optional(arguments, kind)
        if origin is tuple or origin is frozenset:
            return self._sequence(origin, arguments, kind)
        if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
            return self._mapping(arguments, kind)
        if type_ in (int, float, bool, type(None)):
            return None
        msg = f"{type_}: a recorded value of this type cannot be rewritten"
        raise TypeError(msg)

    def _tuple_rewriter(self, type_: Any) -> "Rewrite | None":
        kinds = _KINDS.get(type_.__name__, {})
        parts: list[tuple[int, Rewrite]] = []
        for place, (field, annotation) in enumerate(typing.get_type_hints(type_, include_extras=True).items()):
            if type_ is Pod and field in ("labels", "annotations"):
                parts.append((place, self._labels))
            elif (rewrite := self._rewriter(annotation, kinds.get(field, _TEXT))) is not None:
                parts.append((place, rewrite))
        if not parts:
            return None
        make = type_._make

        def rewrite_tuple(value: Any) -> Any:
            fields = list(value)
            for place, rewrite in parts:
                fields[place] = rewrite(fields[place])
            return make(fields)

        return self._remembering(rewrite_tuple) if type_ is Pod else rewrite_tuple

    def _remembering(self, rewrite: "Rewrite") -> "Rewrite":
        def rewrite_pod(pod: Any) -> Any:
            done = self._pods.get(id(pod))
            if done is not None:
                return done[1]
            if len(self._pods) >= MAX_REMEMBERED:
                self._pods.clear()
            new = rewrite(pod)
            self._pods[id(pod)] = (pod, new)
            return new

        return rewrite_pod

    def _optional(self, members: tuple[Any, ...], kind: str) -> "Rewrite | None":
        rewriters = [
            rewrite
            for each in members
            if each is not type(None) and (rewrite := self._rewriter(each, kind)) is not None
        ]
        if not rewriters:
            return None
        if len(rewriters) > 1:
            msg = f"{members}: a recorded value of these types cannot be rewritten"
            raise TypeError(msg)
        (rewrite,) = rewriters
        return lambda value: None if value is None else rewrite(value)

    def _sequence(self, origin: type, members: tuple[Any, ...], kind: str) -> "Rewrite | None":
        if origin is tuple and not (len(members) == 2 and members[1] is Ellipsis):
            rewriters = [self._rewriter(each, kind) for each in members]
            if not any(rewriters):
                return None
            return lambda values: tuple(
                [self._apply(each, value) for each, value in zip(rewriters, values, strict=True)]
            )
        rewrite = self._rewriter(members[0], kind)
        return None if rewrite is None else lambda values: origin([rewrite(value) for value in values])

    def _mapping(self, members: tuple[Any, ...], kind: str) -> "Rewrite | None":
        keys_, values = self._rewriter(members[0], kind), self._rewriter(members[1], kind)
        if keys_ is None and values is None:
            return None
        return lambda mapping: {self._apply(keys_, key): self._apply(values, item) for key, item in mapping.items()}


Rewrite = Callable[[Any], Any]
_EVICTION_KEYS: Final = frozenset({"offending_containers", "offending_containers_usage", "starved_resource"})


@functools.cache
def _vocabulary() -> frozenset[str]:
    """Every word of this package's source and of the kernel's errors in lower case, and the keys of the
    configuration."""
    words: set[str] = set()
    folders: list[Traversable] = [resources.files("nodeagent")]
    while folders:
        for entry in folders.pop().iterdir():
            if entry.is_dir():
                folders.append(entry)
            elif entry.name.endswith(".py"):
                words.update(word.lower() for word in _PLAIN.findall(entry.read_text("utf-8")))
    for number in errno.errorcode:
        words.update(word.lower() for word in _PLAIN.findall(os.strerror(number)))
    words.update(key.name.lower() for _, section in keys.sections() for key in section)
    return frozenset(words)
