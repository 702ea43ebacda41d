"""Scores the doctor on bad runs and healthy ones; `make doctor-score` runs it.

python tests/diagnosis/score.py                 development runs (three seeds) and held-out runs
python tests/diagnosis/score.py --only held-out the held-out runs alone
python tests/diagnosis/score.py --folder DIR    logs called SLUG__ANYTHING (or healthy__...)
python tests/diagnosis/score.py --seeds 7 8     other seeds of the development runs

The two figures mean different things. The thresholds were tuned on the generators of the
development runs: their figure guards against a step back, and says little of other logs. Nobody
tunes on the held-out runs (`held_out/runs.py`): theirs is an estimate, of small models.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from diagnosis.healthy_runs import KINDS, healthy
from diagnosis.held_out.runs import all_runs
from diagnosis.problems import PROBLEMS
from diagnosis.sick_runs import FAULTS, problems_of, sick
from surefoot.diagnosis.doctor import examine
from surefoot.diagnosis.readers import read_recording

NEEDED = 0.9
HEALTHY = "healthy"
DEVELOPMENT = "development runs: THE THRESHOLDS WERE TUNED ON THESE GENERATORS"
HELD_OUT = "held-out runs: no threshold was tuned on them"


def made(folder: Path, seeds: list[int]) -> Iterator[tuple[str, Path]]:
    """Every development run, as what is wrong with it and where its log is."""
    for slug in FAULTS:
        for problem in problems_of(slug):
            for seed in seeds:
                path = folder / f"{slug}__{problem}__{seed}.jsonl"
                yield slug, sick(slug, problem, seed).write(path)
    for kind in KINDS:
        for problem in PROBLEMS:
            for seed in seeds:
                path = folder / f"{HEALTHY}__{kind}-{problem}__{seed}.jsonl"
                yield HEALTHY, healthy(kind, problem, seed).write(path)


def found(folder: Path) -> Iterator[tuple[str, Path]]:
    """The logs of a folder, by the slug that their names begin with."""
    for path in sorted(folder.iterdir()):
        yield path.name.partition("__")[0], path


def score(title: str, logs: Iterable[tuple[str, Path]]) -> bool:
    """Prints what was missed and the score; whether it is high enough."""
    print(f"\n== {title}\n", flush=True)
    right: dict[str, int] = defaultdict(int)
    runs: dict[str, int] = defaultdict(int)
    named_at_all = 0
    for slug, path in logs:
        named = [finding.slug for finding in examine(read_recording(path)).findings]
        is_right = not named if slug == HEALTHY else named[:1] == [slug]
        right[slug] += is_right
        runs[slug] += 1
        named_at_all += slug in named
        if not is_right:
            print(f"{path.name}: {', '.join(named) or 'nothing found'}", flush=True)
    print()
    for slug in runs:
        print(f"{slug:28s} {right[slug]:4d} of {runs[slug]}")
    sick_runs = sum(runs.values()) - runs[HEALTHY]
    sick_right = sum(right.values()) - right[HEALTHY]
    share = sick_right / max(1, sick_runs)
    print(
        f"\n{title.partition(':')[0]}: cause named first: {sick_right} of {sick_runs} ({share:.1%})"
    )
    print(f"named first or further down: {named_at_all} of {sick_runs}")
    print(f"healthy runs called sick: {runs[HEALTHY] - right[HEALTHY]} of {runs[HEALTHY]}")
    return share >= NEEDED and right[HEALTHY] == runs[HEALTHY]


def main() -> int:
    """Scores the sets that are asked for; 1 where that of the development runs is too low."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", choices=["development", "held-out"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.folder:
        return int(not score(str(arguments.folder), found(arguments.folder)))
    is_high = True
    with tempfile.TemporaryDirectory() as temporary:
        if arguments.only != "held-out":
            is_high = score(DEVELOPMENT, made(Path(temporary), arguments.seeds))
        if arguments.only != "development":
            score(HELD_OUT, all_runs(Path(temporary)))
    return int(not is_high)


if __name__ == "__main__":
    raise SystemExit(main())
