"""The set of mutants: every mutation of every script here that is a bug at all.

`mutants.txt` is the set as it was fixed. A mutation is no member where
- the script crashes: Python says so itself;
- its outcome (weights, buffers, measures) is bit-equal to that of the clean script, unless the bug
  is one of memory only;
- an earlier mutation of the same line and kind has a bit-equal outcome: it is the same mutation;
- its label does not hold, for a reason written in `NO_BUG`.
Whether the audit finds it plays no part. Knows no rule of the audit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from sanitizer_zoo.mutants.mutant import Mutant
from sanitizer_zoo.mutants.operators import mutants_of
from sanitizer_zoo.mutants.roles import Script

HERE = Path(__file__).parent
LIST = HERE / "mutants.txt"
FIRST, LATER = HERE / "scripts", HERE / "scripts_later"
"""Scripts whose misses rules were improved for, and scripts written after that."""
# Bugs of memory: the numbers of the script are the same with them.
CHANGE_NO_NUMBER = {"graph-retained", "eval-with-grad"}
# Kinds that the catalogue of kinds itself calls a guess or advice: a hint is all that is asked.
HINTS = {
    "accum-no-scale",
    "accum-token-mean",
    "adam-l2",
    "data-no-shuffle",
    "decay-norm-bias",
    "init-loss-off",
    "loss-includes-padding",
    "param-frozen-by-mistake",
    "sched-wrong-unit",
    "sync-every-step",
    "target-not-detached",
}
# Mutations whose label does not hold, each for a reason that has nothing to do with any rule.
NO_BUG = {
    "distillation:52 unwrap with torch.no_grad():": "the teacher is frozen: there is no graph",
    "actor_critic:39 drop .detach() in advantage = (target - value).detach()": (
        "no target of a regression; the policy's loss may reach the value"
    ),
    "averaged_weights:68 move out of if: constant.step()": "averaging from the start is a choice",
    "causal_transformer:77 floor division in (update - WARMUP) / (NUM_UPDATES - WARMUP)": (
        "the rate stays at its peak, which is no zero"
    ),
    "grown_vocabulary:63 drop nn.init.normal_(pretrained.embedding.weight, std=0.1)": (
        "the embedding is not tied there: the first loss is that of chance"
    ),
    'counted_windows:43 drop reduction of F.cross_entropy(self.model(x), y, reduction="sum")': (
        "all micro-batches are equally large: only the rate changes"
    ),
    "contrastive:44 drop upper slices of queue = torch.cat([k, queue])[:QUEUE]": (
        "a queue is no data set"
    ),
    "contrastive:73 drop upper slices of history = embed(query, keys, data[:96])": (
        "it learns from noised views without labels: no sample comes again"
    ),
    "masked_words:77 move out of loop: ids, labels = corpus.batch_of(32)": (
        "a fixed batch to evaluate on is meant often"
    ),
    "masked_words:46 floor division in (total - step) / (total - warm)": (
        "the rate falls to its floor, which is no zero"
    ),
    "translation:66 decoder in nn.utils.clip_grad_norm_(encoder.parameters(), 0.05)": (
        "one optimizer steps both: what is clipped is used"
    ),
    "translation:67 encoder in nn.utils.clip_grad_norm_(decoder.parameters(), 0.3)": (
        "one optimizer steps both: what is clipped is used"
    ),
    "variational:57 only rebuild_loss in (rebuild_loss + weight * spread_loss).backward()": (
        "every parameter still has a gradient"
    ),
    "loss_scaler:31 float32 becomes bfloat16 in torch.float32": (
        "at this rate hardly an update is lost"
    ),
    "churn_tabular:18 drop upper slices of known = features[:TRAIN_ROWS]": (
        "only means and scales come from there: no sample is seen twice"
    ),
    "conv_vae:81 flip drop_last of DataLoader(train_set, batch_size=16, shuffle=True, "
    "drop_last=True)": "the last batch holds ten samples",
    "distill_notebook:19 flip drop_last of DataLoader(TensorDataset(points[:232], labels[:232]), "
    "batch_size=40, shuffle=True, drop_last=True)": "the last batch holds 32 samples",
    "distill_notebook:79 move out of if: steady.step()": "annealing from the start is a choice",
    "grid_reinforce:61 drop upper slices of chosen = "
    "train_pairs[torch.randperm(len(train_pairs))[:BATCH]]": "all training pairs are one batch",
    "grid_reinforce:66 drop .detach() in gained = (returns - values.detach())[played]": (
        "no target of a regression; the policy's loss may reach the value"
    ),
    "load_forecast:50 neighbour's slice in series[:, :-1]": "numbers of a series are no tokens",
}


def scripts() -> list[Script]:
    """Every clean script."""
    paths = (path for folder in (FIRST, LATER) for path in sorted(folder.glob("*.py")))
    return [Script(path.stem, path.read_text()) for path in paths]


def is_later(script: str) -> bool:
    """Whether a script was written after the rules were improved."""
    return (LATER / f"{script}.py").exists()


def ranks_of(script: str) -> int:
    """How many ranks a script is for."""
    return 2 if script.startswith("two_ranks") else 1


@functools.cache
def every_mutation() -> list[Mutant]:
    """Every mutation of every script, in a fixed order."""
    return [mutant for script in scripts() for mutant in mutants_of(script)]


def mutants() -> list[Mutant]:
    """The members of the fixed set; fails where one is not made any more, or has other kinds."""
    made = {entry(mutant): mutant for mutant in every_mutation()}
    return [made[line] for line in LIST.read_text().splitlines()]


def entry(mutant: Mutant) -> str:
    """A line of `mutants.txt`."""
    return f"{mutant.name} -> {', '.join(mutant.kinds)}"


def members(run: Callable[[str, str], tuple[int, str]]) -> list[tuple[Mutant, str]]:
    """Every mutation with why it is no member, or the empty text.

    `run(script name, text)` returns exit code and digest of the outcome.
    """
    judged, seen = [], set()
    clean = {script.name: run(script.name, script.text) for script in scripts()}
    for mutant in every_mutation():
        code, outcome = run(mutant.script, mutant.text)
        changes_no_number = mutant.kinds[0] in CHANGE_NO_NUMBER
        key = (mutant.script, mutant.line, mutant.kinds[0], outcome)
        reason = ""
        if mutant.name in NO_BUG:
            reason = NO_BUG[mutant.name]
        elif code != 0:
            reason = "crashes"
        elif outcome == clean[mutant.script][1] and not changes_no_number:
            reason = "computes the same"
        elif key in seen and not changes_no_number:
            reason = "is an earlier mutation again"
        seen.add(key)
        judged.append((mutant, reason))
    return judged
