"""Define what limits the value of a configuration key; `schema.py` annotates its fields with these."""

import enum
from typing import Final, NamedTuple


class Range(NamedTuple):
    """Smallest and largest number; seconds for a duration."""

    minimum: float
    maximum: float


class OneOf(NamedTuple):
    """The words that a string may be."""

    words: tuple[str, ...]


class Shape(NamedTuple):
    """The form of a string."""

    pattern: str
    description: str
    """For messages: `must be ...`."""


class MapKey(NamedTuple):
    """The form of the keys of a map whose keys are not signals."""

    pattern: str
    description: str
    """For messages: `must be ...`."""
    what: str
    """What the keys name, in one word."""


class Mark(enum.Enum):
    DERIVED = "derived"
    """Not a key of the file."""
    WHOLE_SECONDS = "whole seconds"
    """A plain number of seconds in the file, as in the kubelet's, although all other durations have units."""
    NOT_EMPTY = "not empty"
    MAY_REPEAT = "may repeat"
    """A list in which the same word may stand twice."""


class AmountRule(enum.Enum):
    """The use of an amount, which decides whether zero and more than all are valid."""

    THRESHOLD = "threshold"
    """Above zero; a percentage from 0% to 100%."""
    RECLAIM = "minimum reclaim"
    """A quantity may be 0, a percentage must be above 0% and may be above 100%."""
    SHARE = "share"
    """A quantity may be 0, a percentage is from 0% to 100%."""
    SIZE = "size"
    """A quantity from `MIN_SIZE` to `MAX_SIZE` bytes, no percentage."""


MIN_SIZE: Final = 1 << 20
MAX_SIZE: Final = 1 << 40


MAX_DURATION_S: Final = 31_536_000.0
"""A year: no duration of the agent is useful above it, and a slip such as 300h for 300m still passes."""
ANY_DURATION: Final = Range(0, MAX_DURATION_S)
POSITIVE_DURATION: Final = Range(0.001, MAX_DURATION_S)
SHARE: Final = Range(0, 1)
COUNT: Final = Range(1, 100_000)
NAMESPACES: Final = Shape(
    r"\*|[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "a namespace (lower-case letters, digits and '-') or `*`"
)
DNS_LABEL: Final = Shape(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "a namespace: lower-case letters, digits and '-'")
NAMESPACE_KEY: Final = MapKey(*DNS_LABEL, "namespace")
_LABEL_NAME: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LABEL_KEY: Final = MapKey(
    rf"([a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_LABEL_NAME}", "the key of a label, `name` or `prefix/name`", "label"
)
LABEL_VALUE: Final = Shape(rf"({_LABEL_NAME})?", "the value of a label: letters, digits, `-_.`")
PROFILE_NAME: Final = Shape(_LABEL_NAME, "a name: letters, digits, `-_.`")
NODE_NAME: Final = Shape(
    r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?", "a node name: lower-case letters, digits, '-' and '.'"
)
DIRECTORY: Final = Shape(r"/[^\x00-\x1f]*", "an absolute path")
DIRECTORY_OR_NONE: Final = Shape(r"(/[^\x00-\x1f]*)?", "an absolute path, or empty")
FILE_OR_NONE: Final = Shape(r"[^\x00-\x1f]*", "a path")
SELECTOR: Final = Shape(r"[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?(=[^\x00-\x1f]*)?", "`key` or `key=value`")
ACTION_NAME: Final = Shape(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", "a name: letters, digits, `-_.`")
ARGUMENT: Final = Shape(r"[^\x00]+", "a word")
_PORT: Final = r"([0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
ADDRESS: Final = Shape(rf"([^\s/]*:{_PORT})?", "`host:port`, `:port`, or empty; a port is at most 65535")
URL_OR_NONE: Final = Shape(r"(https?://[\x21-\x7e]+)?", "an http:// or https:// address, or empty")
