"""The record: code, machine, packages and switches; no secret; kept over a crash and a resume."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from surefoot.observe import machine, record, repository
from surefoot.observe.machine import container_hint, describe_machine, features
from surefoot.observe.record import collect_record, hide_secrets, torch_state, write_record
from surefoot.observe.repository import repository_state
from surefoot.observe.run_folder import RunFolder


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "trunk")
    (folder / "model.py").write_text("width = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def collect(project: Path, **more: object) -> record.RunRecord:
    arguments = {"name": "a", "seed": 7, "data": {"digits": {"fingerprint": "f00"}}}
    return collect_record(**(arguments | {"folder": project} | more))  # type: ignore[arg-type]


def test_a_clean_repository_has_a_commit_and_no_diff(project: Path) -> None:
    state = repository_state(project)
    assert state.commit == git(project, "rev-parse", "HEAD").strip()
    assert (state.branch, state.dirty, state.diff) == ("trunk", False, b"")
    assert state.reason is None


def test_uncommitted_changes_are_kept_as_a_diff_that_applies(project: Path, tmp_path: Path) -> None:
    (project / "model.py").write_text("width = 2\n")
    (project / "new.py").write_text("secret = 1\n")
    git(project, "checkout", "-q", "--detach")
    inside = project / "sub"
    inside.mkdir()
    state = repository_state(inside)
    assert (state.branch, state.dirty) == (None, True)
    assert state.untracked == ("new.py",)
    assert b"secret" not in state.diff
    git(project, "checkout", "-q", ".")
    (tmp_path / "a.diff").write_bytes(state.diff)
    git(project, "apply", str(tmp_path / "a.diff"))
    assert (project / "model.py").read_text() == "width = 2\n"


def test_a_huge_diff_is_cut_and_says_so(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "model.py").write_text("x = 1\n" * 100_000)
    whole = repository_state(project)
    assert len(whole.diff) == whole.diff_bytes > 500_000
    for module in (repository, record):
        monkeypatch.setattr(module, "MAX_DIFF_BYTES", 1000)
    fields = collect(project).fields["git"]
    assert isinstance(fields, dict)
    assert fields["diff_cut"] is True
    assert fields["diff_bytes"] == whole.diff_bytes
    assert fields["diff_sha256"] == whole.diff_sha256
    assert len(collect(project).diff) == 1000


def test_no_repository_no_commit_and_no_git_are_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    state = repository_state(tmp_path)
    assert state.commit is None
    assert state.reason is not None
    assert "not a git repository" in state.reason
    git(tmp_path, "init", "-q")
    assert repository_state(tmp_path).reason == "the repository has no commit yet"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert repository_state(tmp_path).reason == "git is not installed"


def test_another_repository_in_the_environment_does_not_confuse(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = git(project, "rev-parse", "HEAD").strip()
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert repository_state(project).commit == commit


def test_the_record_names_everything_and_is_strict_json(project: Path, tmp_path: Path) -> None:
    (project / "model.py").write_text("width = 3\n")
    with RunFolder.create_at(tmp_path / "run") as folder:
        path = write_record(folder, collect(project, extra={"device": "cpu", "best": float("inf")}))
        read = json.loads(path.read_text("utf-8"))
        assert path == folder.record_path
        diff = (folder.path / read["git"]["diff_file"]).read_text()
    assert "+width = 3" in diff
    assert read["seed"] == 7
    assert read["data"] == {"digits": {"fingerprint": "f00"}}
    assert read["extra"] == {"device": "cpu", "best": "Infinity"}
    assert read["torch"]["version"] == torch.__version__
    assert read["packages"]["torch"] == metadata.version("torch")
    assert read["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert read["command_line"]
    assert read["hardware"]["cpu"]["usable_cores"] >= 1
    assert read["container"]["kind"]
    assert read["system"]["platform"]
    assert read["started"].endswith("+00:00")


def test_a_resume_keeps_the_first_record(project: Path, tmp_path: Path) -> None:
    (project / "model.py").write_text("width = 3\n")
    with RunFolder.create_at(tmp_path / "run") as folder:
        write_record(folder, collect(project))
        first = folder.record_path.read_bytes()
        names = [write_record(folder, collect(project, seed=n)).name for n in (8, 9)]
        assert names == ["record.resume-1.json", "record.resume-2.json"]
        assert folder.record_path.read_bytes() == first
        diffs = sorted(p.name for p in folder.artifacts_path.iterdir())
    assert diffs == [
        "uncommitted.diff",
        "uncommitted.resume-1.diff",
        "uncommitted.resume-2.diff",
    ]


def test_no_secret_of_the_environment_is_recorded(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUB_TOKEN", "hunter2")
    monkeypatch.setenv("NCCL_SECRET_THING", "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = collect(project, command_line=["train", "--hub-token", "hunter2"])
    text = json.dumps(found.fields)
    assert "hunter2" not in text
    environment = found.fields["environment"]
    assert isinstance(environment, dict)
    assert environment["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["--password=a=b"], ["--password=[hidden]"]),
        (["--api-key", "abc", "--seed", "1"], ["--api-key", "[hidden]", "--seed", "1"]),
        (["--set", "data.token=abc"], ["--set", "data.token=[hidden]"]),
        (["--use-auth", "--seed", "1"], ["--use-auth", "--seed", "1"]),
        (["s3://key:pw@host/p"], ["s3://[hidden]@host/p"]),
        (["--set", "model.width=64"], ["--set", "model.width=64"]),
        (["tokenize", "abc"], ["tokenize", "abc"]),
    ],
)
def test_values_that_look_secret_are_hidden(given: list[str], shown: list[str]) -> None:
    assert hide_secrets(given) == shown


def test_torchs_switches_are_read_as_they_are() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        state = torch_state()
        assert (state["threads"], state["deterministic_algorithms"]) == (1, True)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    assert torch_state()["deterministic_algorithms"] is False
    assert all(isinstance(v, (str, int, bool, type(None))) for v in torch_state().values())


def test_a_machine_without_a_driver_says_why() -> None:
    described = describe_machine()
    json.dumps(described, allow_nan=False)
    driver = described["driver"]
    assert isinstance(driver, dict)
    if not described["gpus"]:
        assert driver["reason"]
    memory = described["memory"]
    assert isinstance(memory, dict)
    assert memory["total_bytes"] > 0


@pytest.mark.parametrize(
    ("capability", "supported"),
    [
        (None, set()),
        ("7.5", {"cuda", "fp16 on gpu"}),
        ("8.0", {"cuda", "fp16 on gpu", "bf16 on gpu", "tf32"}),
        ("9.0", {"cuda", "fp16 on gpu", "bf16 on gpu", "tf32", "fp8 on gpu"}),
        ("10.0", {"cuda", "fp16 on gpu", "bf16 on gpu", "tf32", "fp8 on gpu", "fp4 on gpu"}),
    ],
)
def test_what_a_gpu_supports_follows_from_its_capability(
    capability: str | None, supported: set[str]
) -> None:
    gpus: list[dict[str, object]] = [{"compute_capability": capability}]
    found = features({"instructions": []}, gpus)
    assert {name for name, fact in found.items() if fact["supported"]} - {
        "mps",
        "rocm",
    } == supported
    assert all(fact["reason"] for fact in found.values())


def test_what_a_processor_supports_follows_from_its_flags() -> None:
    found = features({"instructions": ["avx2", "amx_bf16"]}, [])
    assert found["amx"] == {"supported": True, "reason": "amx_bf16"}
    assert found["bf16 on cpu"]["supported"] is True
    assert found["vector units"]["reason"] == "avx2"
    found = features({"instructions": []}, [])
    assert "emulated" in str(found["bf16 on cpu"]["reason"])


def test_a_processor_is_read_from_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "/proc/cpuinfo": "model name\t: Some CPU\nflags\t: fpu avx2 amx_tile\n\nmodel name\t: x\n",
        "/sys/fs/cgroup/cpu.max": "150000 100000\n",
        "/sys/fs/cgroup/memory.max": "1000000\n",
    }
    monkeypatch.setattr(machine, "_read", lambda path: texts.get(path, ""))
    cpu = machine.describe_cpu()
    assert (cpu["name"], cpu["quota_cores"]) == ("Some CPU", 1.5)
    assert cpu["instructions"] == ["avx2", "amx_tile"]
    assert machine.describe_memory()["limit_bytes"] == 1_000_000


def test_a_container_is_told_by_its_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(machine, "_read", lambda path: "")
    assert container_hint()["kind"] == "none"
    monkeypatch.setattr(machine, "_read", lambda path: "0::/kubepods/pod1")
    assert container_hint() == {"kind": "kubernetes", "sign": "cgroup"}
    monkeypatch.setenv("APPTAINER_CONTAINER", "image.sif")
    assert container_hint()["kind"] == "apptainer"


def test_the_record_reads_no_more_of_the_environment_than_its_list() -> None:
    assert all(name.isupper() for name in record.RECORDED_VARIABLES)
    tokens = [name for name in record.RECORDED_VARIABLES if "TOKEN" in name]
    assert tokens == ["TOKENIZERS_PARALLELISM"]
    assert sorted(set(record.RECORDED_VARIABLES)) == sorted(record.RECORDED_VARIABLES)
