"""The script for a GPU, tried where there is none."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu_check.py"


@pytest.fixture
def gpu_check():
    pytest.importorskip("triton")
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_part_of_the_gpu_script_runs_on_small_sizes(gpu_check, tmp_path):
    out = tmp_path / "results.json"
    assert gpu_check.main(["--device", "cpu", "--quick", "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    checks = [row for part in results.values() if isinstance(part, list) for row in part]
    assert len(checks) >= 15 and all(row["ok"] for row in checks)
    assert results["decode tokens per second"]["16 requests, eager"] > 0
    assert results["transformers' continuous batching"]["ratio"] > 0
    assert "device copy" in results["bandwidth"]


def test_a_wrong_kernel_is_found(gpu_check, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "reshape_and_cache", lambda *arguments: None)
    check = gpu_check.Check(gpu_check.torch.device("cpu"), quick=True)
    assert not any(row["ok"] for row in gpu_check.check_cache_writes(check))
