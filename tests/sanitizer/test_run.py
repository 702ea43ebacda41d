"""Running scripts: exit codes, crashes, early ends, suppressions, ranks and outputs."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from surefoot.cli.main import invoke as command
from surefoot.core.errors import RequestError
from surefoot.sanitizer.request import Request
from surefoot.sanitizer.rules import all_rules
from surefoot.sanitizer.supervise import Result, audit

LOOP = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(3, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    opt.zero_grad()
    model(torch.randn(4, 3)).mean().backward()
    opt.step()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1){comment}
"""


def write(folder: Path, comment: str = "") -> Path:
    script = folder / "loop.py"
    script.write_text(LOOP.format(comment=comment))
    return script


def audited(script: Path, **options: object) -> Result:
    return audit(Request(str(script), **options))  # type: ignore[arg-type]


def test_a_comment_on_the_line_silences_its_code_only(tmp_path: Path) -> None:
    clip = "    nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
    other = f"{clip}  # surefoot: ignore[SF102] another rule\n"
    script = write(tmp_path, comment=f"  # surefoot: ignore[SF101] to see the norm\n{other}")
    (finding,) = audited(script).findings
    assert (finding.code, finding.line) == ("SF101", 12)


def test_there_is_no_such_script(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no script"):
        audited(tmp_path / "nothing.py")


def test_command_fails_on_a_proof_and_writes_every_format(tmp_path: Path) -> None:
    names = {kind: tmp_path / f"out.{kind}" for kind in ("json", "sarif", "xml")}
    options = ["--json", names["json"], "--sarif", names["sarif"], "--junit", names["xml"]]
    assert command(["audit", *map(str, options), str(write(tmp_path))]) == 1
    facts = json.loads(names["json"].read_text())
    keys = {"code", "slug", "severity", "certainty", "file", "line", "evidence", "fix"}
    (finding,) = facts["findings"]
    assert keys <= set(finding)
    assert (finding["file"], finding["line"]) == (str(tmp_path / "loop.py"), 11)
    assert finding["evidence"]["step_line"] == 10
    sarif = json.loads(names["sarif"].read_text())
    assert sarif["version"] == "2.1.0"
    assert sarif["runs"][0]["results"][0]["ruleId"] == "SF101"
    assert len(sarif["runs"][0]["tool"]["driver"]["rules"]) == len(all_rules())
    (suite,) = ElementTree.fromstring(names["xml"].read_text())
    assert suite.get("failures") == "1"


def test_two_ranks_are_merged(tmp_path: Path) -> None:
    result = audited(write(tmp_path), num_ranks=2)
    (finding,) = result.findings
    assert result.num_processes == 2
    assert finding.evidence["ranks"] == [0, 1]


SPAWN = """
import torch, torch.multiprocessing as mp
from torch import nn
def work(rank):
    torch.set_num_threads(1)
    model = nn.Linear(3, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        model(torch.randn(4, 3)).mean().backward()
        opt.step()
if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""


def test_spawned_children_are_followed(tmp_path: Path) -> None:
    script = tmp_path / "spawning.py"
    script.write_text(SPAWN)
    result = audited(script)
    assert [finding.slug for finding in result.findings] == ["missing-zero-grad"]
    assert result.findings[0].evidence["ranks"] == [0, 1]
    assert result.findings[0].line == 10


def test_every_rule_explains_itself() -> None:
    codes = [rule.info.code for rule in all_rules()]
    assert len(set(codes)) == len({rule.info.slug for rule in all_rules()}) == len(codes) == 65
    for rule in all_rules():
        info = rule.info
        assert all((info.title, info.observes, info.why, info.example, info.fix, info.source))
        compile_example(info.example)


def compile_example(source: str) -> None:
    compile(source, "example", "exec")
