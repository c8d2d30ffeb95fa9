"""`nodeagent explain` over full files of records: it runs in the agent's container, beside the agent."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from nodeagent.model import Outcome, OutcomeKind
from nodeagent.policy import engine, ranking
from nodeagent.policy import state as policy_state
from nodeagent.records.flight_recorder import DECISIONS_FILE, MAX_FILE_BYTES, OLDER_FILE, DecisionInputs, FlightRecorder
from tests.support import nodes

MOST_KIB: Final = 24 << 10
"""More than the list of an empty directory. Measured: 7 MiB with 110 pods and 12 with 3; as objects 81 and 65."""
PEAK: Final = """
import sys
from nodeagent.commands import cli
code = cli.main(["explain", *sys.argv[1:]])
with open("/proc/self/status") as status:
    print(next(int(line.split()[1]) for line in status if line.startswith("VmHWM")), file=sys.stderr)
sys.exit(code)
"""


def full(directory: Path, pods: int) -> Path:
    """A state directory with two files of records, as an agent leaves them."""
    views = [nodes.view(f"pod-{number}", (number + 1) * nodes.MI) for number in range(pods)]
    snapshot = nodes.snapshot(*views)
    config = nodes.config(nodes.hard(value=nodes.GI))
    state = policy_state.initial("abcd1234", now=nodes.NOW - 10)
    plan, after = engine.decide(snapshot, state, now=nodes.NOW, config=config)
    inputs, plan = DecisionInputs(snapshot, after, nodes.NOW, config.thresholds, 1), ranking.with_key_texts(plan)
    recorder, number, older = FlightRecorder(directory), 0, directory / OLDER_FILE
    while not older.exists() or (directory / DECISIONS_FILE).stat().st_size < MAX_FILE_BYTES - (256 << 10):
        number += 1
        identity, wall = f"abcd1234-{number}", nodes.WALL + 10 * number
        recorder.decision(plan._replace(id=identity), wall_time=wall, inputs=inputs)
        for victim in plan.victims:
            outcome = Outcome(identity, victim.pod.uid, OutcomeKind.ACCEPTED, "evicted", nodes.NOW)
            recorder.outcome(outcome, wall_time=wall)
    return directory


def peak_kib(*words: object) -> tuple[int, str]:
    ran = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, words)], capture_output=True, text=True, check=True, timeout=120
    )
    return int(ran.stderr), ran.stdout


@pytest.fixture(scope="module")
def least_kib(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Without a record."""
    return peak_kib("--state-dir", tmp_path_factory.mktemp("empty"))[0]


@pytest.mark.parametrize("pods", [110, 3])
def test_full_files_of_records_need_little_memory(tmp_path: Path, least_kib: int, pods: int) -> None:
    """Few large records, or many small ones."""
    directory = full(tmp_path, pods)
    for words in ([], ["last"], ["--pod", f"shop/pod-{pods - 1}"]):
        kib, output = peak_kib("--state-dir", directory, *words)
        assert output.count("abcd1234-"), words
        assert kib - least_kib < MOST_KIB, words
