"""What a run is, as plain values: for its record, its checkpoints and the disk it needs."""

from __future__ import annotations

import json

from assembly.parts import INPUTS, assembled
from surefoot.assembly.material import Prepared
from surefoot.assembly.run_parts import Assembly
from surefoot.config.load import resolve_settings
from surefoot.run.run_facts import RunDescription, describe, exactness, make_record, parameter_sizes


def described_as_tiny(assembly: Assembly) -> RunDescription:
    resolved = resolve_settings(assembly.settings)
    return describe("tiny", resolved, Prepared(assembly.material), assembly)


def test_a_description_is_plain_values_and_says_what_each_checkpoint_shall_say() -> None:
    assembly = assembled()
    resolved = resolve_settings(assembly.settings)
    described = describe("tiny", resolved, Prepared(assembly.material), assembly)
    json.dumps([described.about, described.facts, described.data])
    assert described.about["config_hash"] == resolved.digest and described.about["begun_for"] == 6
    assert described.about["data"].keys() == {"train", "validation"}
    assert described.end == (6.0, "steps") and not described.counts_tokens
    assert described.facts["parameters"] == 4


def test_a_run_ends_in_its_own_unit_where_updates_are_not_known() -> None:
    assembly = assembled(train={"horizon": "30 min"})
    described = described_as_tiny(assembly)
    assert described.end == (1800.0, "seconds") and described.about["begun_for"] is None


def test_the_disk_must_hold_one_checkpoint_more_than_are_kept() -> None:
    many = assembled(checkpoint={"every": "2 steps", "keep": 3, "keep_best": 1})
    described = described_as_tiny(many)
    one = described.needed_bytes(resuming=True) // 2
    assert described.needed_bytes() == 6 * one and one > described.size.num_bytes


def test_frozen_parameters_count_and_are_not_trained() -> None:
    assembly = assembled()
    assembly.material.model.bias.requires_grad_(False)  # type: ignore[operator, union-attr]
    size = parameter_sizes(assembly)
    assert (size.num_elements, size.num_trained) == (4, 3)


def test_the_record_names_what_a_resume_may_rely_on_and_where_it_goes_on() -> None:
    assembly = assembled()
    assert exactness(assembly)["data_order"] == "a function of seed, epoch and position"
    described = described_as_tiny(assembly)
    record = make_record(described, {"weights": INPUTS.nbytes}, {"step": 3})
    plain = json.loads(json.dumps(record.fields))
    assert plain["name"] == "tiny" and plain["extra"]["memory"] == {"weights": INPUTS.nbytes}
    assert plain["extra"]["resumed"] == {"step": 3}
