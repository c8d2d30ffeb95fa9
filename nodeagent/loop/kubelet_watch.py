"""Follows the kubelet's own thresholds while the agent runs.

Promises:

1. The loop waits for nothing here: `latest` is the last reading of a thread that reads every `READ_EVERY_S`. Only the
   first reading is made by the caller, at the start, and from files alone.
2. Known thresholds stay in force while their sources cannot be read: the kubelet still uses what it once read. Its
   files without its flags are such a case if the flags were known: a kubelet that restarts has no process.
3. The API server is asked only where files and flags give nothing, or not the flags that were known: at the start, at
   a reload and every `CONFIGZ_EVERY_S`; without an answer again after a minute, then two, four and so on. A refusal is
   one note.
"""

from collections.abc import Callable, Sequence
from typing import Final

from nodeagent.kube.api_errors import ApiError
from nodeagent.model import Note, NoteKind
from nodeagent.runtime import clock
from nodeagent.runtime.periodic import Periodic
from nodeagent.sampling.hostfs.host import Host
from nodeagent.sampling.node import kubelet_config
from nodeagent.sampling.node.kubelet_config import KubeletReader, KubeletReading

READ_EVERY_S: Final = 60.0
"""The kubelet reads its files only at its start, so that a change takes about as long anyway. A reading takes
up to 40 opens of files that are mostly absent: 0.05 ms with kubeadm, 0.6 ms with k3s."""
CONFIGZ_EVERY_S: Final = 1800.0
"""The API server passes each request on to the kubelet: 5,000 nodes without readable files send 3 a second."""


class KubeletWatch:
    """The kubelet's thresholds on one host, read again and again."""

    def __init__(
        self,
        host: Host,
        *,
        configz: Callable[[], str],
        k3s_arguments: Callable[[], Sequence[str]] = tuple,
        every_s: float = READ_EVERY_S,
        clock: Callable[[], float] = clock.boottime,
    ) -> None:
        """Reads files and flags once. `configz` asks the API server (`Session.read_configz`), `k3s_arguments` does not
        wait for it (`Session.k3s_arguments`)."""
        self._clock = clock
        self._configz = configz
        self._k3s_arguments = k3s_arguments
        self._read_arguments: Sequence[str] = ()
        """Those of the last reading."""
        self._every_s = every_s
        self._reader = KubeletReader(host)
        self._first = self._known = self._reader.read()
        self._periodic: Periodic[KubeletReading] | None = None
        self._ask_at = float("-inf")
        """When the API server is asked next."""
        self._retry_s = every_s
        self._answer: KubeletReading | None = None
        """The last answer of the API server; None: it was not asked, or has no answer yet."""

    def start(self) -> None:
        """Read in a thread of its own from now on."""
        self._periodic = Periodic(self._read, first=self._first, every_s=self._every_s, name="kubelet-config")

    @property
    def latest(self) -> KubeletReading:
        """The newest reading; the same object while nothing has changed."""
        return self._first if self._periodic is None else self._periodic.latest

    def read_soon(self) -> None:
        """Read now instead of at the next interval, the API server included. Does not wait."""
        self._ask_at, self._retry_s = float("-inf"), self._every_s
        if self._periodic is not None:
            self._periodic.call_soon()

    def follow_k3s(self) -> None:
        """Read now if the arguments of k3s have changed. Does not wait."""
        arguments = self._k3s_arguments()
        if arguments and arguments != self._read_arguments and self._periodic is not None:
            self._periodic.call_soon()

    def close(self) -> None:
        """Read no more."""
        if self._periodic is not None:
            self._periodic.close()

    def _read(self) -> KubeletReading:
        self._read_arguments = self._k3s_arguments()
        reading = kubelet_config.require_known_flags(self._reader.read(self._read_arguments), self._known)
        if reading.known is None:
            reading = self._from_api(reading)
        else:
            self._answer = None  # it is older than this reading
        if reading.known is None and self._known.known is not None:
            reading = _kept(self._known, reading)
        if reading.known is not None and reading != self._known:
            self._known = reading
        return self._known if reading == self._known else reading

    def _from_api(self, reading: KubeletReading) -> KubeletReading:
        """The reading with the kubelet's answer of /configz, or with the reason why there is none."""
        now = self._clock()
        if self._answer is not None and now < self._ask_at:
            return self._answer
        try:
            text = self._configz()
        except ApiError as error:
            self._answer = kubelet_config.not_known(reading, str(error))
            refused = error.status is not None and error.status < 500 and error.status != 429
            self._ask_at = now + (CONFIGZ_EVERY_S if refused else self._retry_s)
            self._retry_s = min(2 * self._retry_s, CONFIGZ_EVERY_S)
            return self._answer
        if not text:
            return reading  # no API server, or the node's identity is not confirmed yet
        self._answer = kubelet_config.from_configz(text)
        self._ask_at, self._retry_s = now + CONFIGZ_EVERY_S, self._every_s
        return self._answer


def _kept(known: KubeletReading, reading: KubeletReading) -> KubeletReading:
    """The known thresholds, with a note that they can no longer be read."""
    why = reading.kubelet.unread if reading.kubelet is not None else kubelet_config.NOT_FOUND
    note = Note(NoteKind.KUBELET, f"configuration no longer readable, its last known thresholds stay: {why}")
    return KubeletReading(known.kubelet, (note,))
