"""`surefoot show`: prints tables about recipes, models and this machine. Changes nothing."""

from __future__ import annotations

import importlib.resources
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli import show_layout, show_parts, show_rules, show_tables
from surefoot.cli.session import DebugOption, JsonOption, Session, SetOption, cells, table
from surefoot.core.errors import RequestError

if TYPE_CHECKING:
    from surefoot.config.load import Resolved
    from surefoot.config.sections import Recipe
    from surefoot.core.schedules import Schedule

app = typer.Typer(
    help="Show recipes, settings, parameters, schedules, parts and this machine.",
    no_args_is_help=True,
)
app.command("optimizers")(show_tables.show_optimizers)
app.command("formats")(show_tables.show_formats)
app.command("hardware")(show_tables.show_hardware)
app.command("rules")(show_rules.show_rules)
app.command("causes")(show_rules.show_causes)
app.command("layout")(show_layout.show_layout)
for word in show_parts.SHELVES:
    app.command(word)(show_parts.show_shelf(word))

MAX_DRAWN_UPDATES = 100_000
"""A longer schedule is sampled at this many updates, including its first and last."""

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a built-in one.")
]


def _load(recipe: str, overrides: list[str] | None) -> Resolved[Recipe]:
    from surefoot.config.load import load_recipe

    return load_recipe(recipe, overrides or [])


def _schedule(recipe: Recipe) -> tuple[Schedule, int]:
    """The schedule and the number of updates of the run; opens the data only if needed.

    Raises:
        RequestError: the number of updates is known only afterwards.
    """
    from surefoot.config.building import make_schedule
    from surefoot.core.counting import Pace, global_batch, updates_in

    train = recipe.train
    updates: object
    try:
        pace = Pace(global_batch(train.micro_batch, train.accumulation))
        updates, schedule = updates_in(train.horizon, pace), make_schedule(recipe, pace)
    except RequestError:
        from surefoot.build import build_schedule

        schedule, updates = build_schedule(recipe)
    if not isinstance(updates, int):
        raise RequestError(
            "the number of updates of this run is known only afterwards",
            where="train.horizon",
            rule="a schedule is drawn over a horizon in steps, tokens, samples or epochs",
            remedy='try --set train.horizon="1000 steps"',
        )
    return schedule, updates


@app.command("recipes")
def show_recipes(
    context: typer.Context, json_file: JsonOption = None, debug: DebugOption = False
) -> None:
    """List the built-in recipes."""
    from surefoot.config.load import recipe_names

    session: Session = context.obj
    shown = table("recipe", "what", "horizon")
    facts = []
    for name in recipe_names():
        recipe = _load(name, None).recipe
        file = importlib.resources.files("surefoot") / "recipes" / f"{name}.yaml"
        what = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        facts.append(
            {
                "recipe": name,
                "what": what,
                "model": recipe.model.kind,
                "data": recipe.data.kind,
                "task": recipe.task.kind,
                "horizon": str(recipe.train.horizon),
            }
        )
        shown.add_row(*cells(name, what, recipe.train.horizon))
    session.console.print(shown)
    session.answer({"recipes": facts})
    session.next(
        ("surefoot show config RECIPE", "every value of one recipe"),
        ("surefoot train RECIPE", "train it"),
    )


@app.command("config")
def show_config(
    context: typer.Context,
    recipe: RecipeArgument,
    overrides: SetOption = None,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """Show the resolved configuration, each value with its origin, and advice on it."""
    from surefoot.config.notes import notes

    session: Session = context.obj
    resolved = _load(recipe, overrides)
    session.say(resolved.as_yaml().rstrip())
    advice = notes(resolved)
    session.advise(advice)
    session.answer(
        {
            "config": resolved.as_dict(),
            "origins": resolved.origins,
            "notes": [finding.as_json() for finding in advice],
        }
    )
    session.next((f"surefoot train {recipe} --dry-run", "build it and run one batch"))


@app.command("params")
def show_params(
    context: typer.Context,
    recipe: RecipeArgument,
    overrides: SetOption = None,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """Show the parameter ledger: group, weight decay and rate of each tensor, and the reason."""
    from surefoot.build import build_ledger, build_model

    session: Session = context.obj
    config = _load(recipe, overrides).recipe
    ledger = build_ledger(build_model(config), config.optimizer)
    shown = table(
        "tensor", "shape", "elements", "group", "decay", "rate x", "decided by", "because"
    )
    for row in ledger.rows:
        mark = "" if row.rules_agree else "  (*)"
        name = row.name + "".join(f" = {alias}" for alias in row.aliases)
        shown.add_row(
            *cells(
                name,
                list(row.shape),
                f"{row.num_elements:,}",
                row.group,
                f"{row.weight_decay:g}",
                f"{row.lr_multiplier:g}",
                row.decided_by + mark,
                row.reason,
            )
        )
    session.console.print(shown)
    total = sum(row.num_elements for row in ledger.rows)
    session.say(f"\n{len(ledger.rows)} trainable tensors, {total:,} elements")
    if ledger.disagreements:
        session.say(
            f"(*) {len(ledger.disagreements)} on which the two weight-decay rules disagree; "
            f"{ledger.rule!r} decides (optimizer.decay_rule)"
        )
    session.answer(
        {
            "rule": ledger.rule,
            "elements": total,
            "rows": ledger.rows,
            "disagreements": [row.name for row in ledger.disagreements],
        }
    )
    groups = "optimizer.groups=[{pattern: NAME*, lr_multiplier: 0.1}]"
    session.next((f"surefoot show params {recipe} --set '{groups}'", "override by name"))


@app.command("schedule")
def show_schedule(
    context: typer.Context,
    recipe: RecipeArgument,
    overrides: SetOption = None,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """Plot the learning rate over the run, with its first, peak and last value."""
    from surefoot.cli.plot import with_axes

    session: Session = context.obj
    config = _load(recipe, overrides).recipe
    schedule, updates = _schedule(config)
    stride = -(-updates // MAX_DRAWN_UPDATES)
    at = sorted({*range(0, updates, stride), updates - 1})
    rates = [config.optimizer.lr * schedule(n) for n in at]
    peak = max(range(len(at)), key=rates.__getitem__)
    first, last = rates[0], rates[-1]
    session.say(f"{config.schedule.kind}, peak rate {config.optimizer.lr:g}, {updates:,} updates\n")
    points = [(float(n), rate) for n, rate in zip(at, rates, strict=True)]
    for line in with_axes(points, "updates", width=max(20, min(100, session.console.width - 16))):
        session.say(line)
    session.say(f"\nfirst  {first:.6g}   update 0")
    session.say(f"peak   {rates[peak]:.6g}   update {at[peak]:,}")
    session.say(f"last   {last:.6g}   update {updates - 1:,}")
    session.answer(
        {
            "schedule": config.schedule.model_dump(mode="json"),
            "updates": updates,
            "first": first,
            "peak": {"rate": rates[peak], "update": at[peak]},
            "last": last,
            "at": at,
            "rates": rates,
        }
    )
    session.next((f"surefoot train {recipe}", "train it"))


@app.command("modes")
def show_modes(
    context: typer.Context,
    recipe: RecipeArgument,
    overrides: SetOption = None,
    json_file: JsonOption = None,
    debug: DebugOption = False,
) -> None:
    """List the modules that compute something else in training than in evaluation."""
    from surefoot.build import build_model
    from surefoot.numerics.modes import mode_sensitive_modules

    session: Session = context.obj
    found = mode_sensitive_modules(build_model(_load(recipe, overrides).recipe))
    session.answer({"modules": found})
    if not found:
        session.say("none: this model computes the same in both modes")
    else:
        shown = table("module", "type", "mode", "in training it", "in evaluation it")
        for entry in found:
            mode = "train" if entry.training else "eval"
            shown.add_row(*cells(entry.name, entry.kind, mode, entry.in_train, entry.in_eval))
        session.console.print(shown)
    session.next((f"surefoot show params {recipe}", "which parameters are trained, and how"))
