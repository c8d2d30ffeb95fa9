"""The search by libFuzzer (atheris), which is guided by the branches of nodeagent's bytecode."""

import sys
import tempfile
from pathlib import Path

import atheris

from tests.fuzz import engine, scratch
from tests.support.paths import REPOSITORY


def run(name: str, *, seconds: float, seed: int, keep: bool) -> None:
    """Search for this long, then exit: 0 without a finding, another code after one."""
    with atheris.instrument_imports(include=["nodeagent"]):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    corpus = engine.CORPUS / name
    with tempfile.TemporaryDirectory(dir=scratch.PARENT) as place:
        # The first directory gets what reaches new branches.
        found = corpus if keep else Path(place) / "found"
        seeds = Path(place) / "seeds"
        for directory in (corpus, found, seeds):
            directory.mkdir(parents=True, exist_ok=True)
        for number, seed_input in enumerate(target.seeds):
            (seeds / str(number)).write_bytes(seed_input)
        words = Path(place) / "words"
        words.write_text("".join(f'"{"".join(f"{chr(92)}x{byte:02x}" for byte in word)}"\n' for word in target.tokens))

        def one(data: bytes) -> None:
            finding = engine.try_input(target, data)
            if finding is not None:
                path = engine.keep(target, finding.data, why=finding.what)
                sys.stdout.write(f"{finding.what} at {finding.place}: {path.relative_to(REPOSITORY)}\n{finding.text}\n")
                sys.stdout.flush()
                raise SystemExit(1)

        options = {
            "max_total_time": max(1, round(seconds)),
            "seed": seed % (1 << 31) or 1,
            "max_len": engine.KEPT_BYTES if keep else engine.MAX_INPUT_BYTES,
            "rss_limit_mb": 2048,
            "timeout": 20,
            "verbosity": 0,
            "print_final_stats": 1,
            "artifact_prefix": f"{corpus}/",
        }
        arguments = [f"-{key}={value}" for key, value in options.items()]
        dictionary = [f"-dict={words}"] if target.tokens else []
        atheris.Setup([sys.argv[0], *arguments, *dictionary, str(found), str(corpus), str(seeds)], one)
        atheris.Fuzz()
