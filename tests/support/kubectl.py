"""A stand-in for the program kubectl, and the way to run the plugin with it.

It answers the three commands that the plugin sends, `get pods`, `get node` and `exec`, with the texts of kubectl's
source; tests/deploy/test_real_kubectl.py runs the plugin with a real one as far as `exec`. Words that it
does not know end it, so that a changed plugin is noticed.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.paths import REPOSITORY

PLUGIN: Final = REPOSITORY / "kubectl-plugin" / "kubectl-nodeagent"
COMPLETION: Final = REPOSITORY / "kubectl-plugin" / "kubectl_complete-nodeagent"
TEMPLATE: Final = (
    '{range .items[*]}{.metadata.name}:{.status.phase}:{.status.conditions[?(@.type=="Ready")].status}:'
    '{.metadata.deletionTimestamp}{"\\n"}{end}'
)
END_OF_ZIP: Final = b"PK\x05\x06" + bytes(18)
_PROGRAM: Final = """\
#!{python}
import json, os, sys
place = {place!r}
words = sys.argv[1:]
with open(os.path.join(place, "calls"), "a") as log:
    log.write(json.dumps(words) + "\\n")
def read(name):
    with open(os.path.join(place, name), "rb") as file:
        return file.read()
def fail(text, code=1):
    sys.stderr.write(text + "\\n")
    sys.exit(code)
while words and words[0].startswith("--"):
    if words.pop(0) == "--context=unknown":
        fail('error: context "unknown" does not exist')
if words[:2] == ["get", "pods"]:
    expected = ["--namespace", "--selector", "--field-selector", "--output"]
    assert words[2::2] == expected, words
    assert words[9] == "jsonpath=" + {template!r}, words[9]
    namespace, selector, field = words[3], words[5], words[7]
    assert selector == "app.kubernetes.io/name=nodeagent"
    if namespace == "forbidden":
        fail('Error from server (Forbidden): pods is forbidden: User "u" cannot list resource "pods" in API group "" in'
             ' the namespace "forbidden"')
    pods = json.loads(read("pods"))
    for name, phase, ready, deleted, node in pods.get(namespace, []):
        if field == "spec.nodeName=" + node:
            print(f"{{name}}:{{phase}}:{{ready}}:{{deleted}}")
elif words[:2] == ["get", "node"]:
    assert words[3:] == ["--output", "name"], words
    if words[2] != "node-1":
        fail(f'Error from server (NotFound): nodes "{{words[2]}}" not found')
    print("node/node-1")
elif words == ["get", "nodes", "--output", "name", "--request-timeout", "5s"]:
    print("node/node-1\\nnode/node-2")
elif words == ["config", "get-contexts", "--output", "name"]:
    print("lab\\nproduction")
elif words[0] == "exec":
    sys.stdout.buffer.write(read("stdout"))
    sys.stdout.flush()
    code = int(read("code"))
    if code:
        fail(f"command terminated with exit code {{code}}", code)
else:
    raise SystemExit(f"not expected: {{words}}")
"""


class Ran(NamedTuple):
    """How the plugin ended."""

    code: int
    out: bytes
    error: str


class FakeKubectl:
    """The program, in a directory of its own."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.program = place / "kubectl"
        self.program.write_text(_PROGRAM.format(python=sys.executable, place=str(place), template=TEMPLATE))
        self.program.chmod(0o755)
        self.has_pods(("nodeagent-abcde", "Running", "True", "", "node-1"))
        self.answers(b"")

    def has_pods(self, *pods: tuple[str, str, str, str, str], namespace: str = "nodeagent") -> None:
        """Name, phase, Ready, deletion timestamp and node of each pod in the namespace."""
        import json

        (self._place / "pods").write_text(json.dumps({namespace: pods}))

    def answers(self, out: bytes, *, code: int = 0) -> None:
        """What the command in the pod prints, and its exit code."""
        (self._place / "stdout").write_bytes(out)
        (self._place / "code").write_text(str(code))

    @property
    def calls(self) -> list[list[str]]:
        """The words of every call."""
        import json

        log = self._place / "calls"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    @property
    def in_pod(self) -> list[str]:
        """The words of the command that ran in the pod; the last one."""
        words = self.calls[-1]
        return words[words.index("--") + 1 :]

    def run(self, line: str, *, directory: Path, program: Path = PLUGIN, shell: str = "sh") -> Ran:
        """Run `kubectl nodeagent LINE` in this directory."""
        ran = subprocess.run(
            [shell, str(program), *shlex.split(line)],
            cwd=directory,
            env={**os.environ, "KUBECTL": str(self.program)},
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
        return Ran(ran.returncode, ran.stdout, ran.stderr.decode())
