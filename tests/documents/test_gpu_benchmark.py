"""benchmarks/gpu.py: its sections, the items of a cheap one, and what happens to a section that fails.
benchmarks/gpu_rollout.py at toy size, and what docs/speed.md says of its results."""

import importlib.util
import json
import re
import subprocess
import sys

from conftest import ROOT

SPEC = importlib.util.spec_from_file_location("gpu", ROOT / "benchmarks/gpu.py")
gpu = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gpu)


def test_each_section_is_described():
    lines = [line.split() for line in gpu.__doc__.splitlines() if line.startswith("    ")]
    assert [words[0] for words in lines if words[0] != "bash"] == list(gpu.SECTIONS)


def test_math_at_toy_size():
    """On the CPU, the math functions agree with themselves, and bf16 with fp32 as far as it can."""
    items = dict(gpu.math_functions("cpu", toy=True, seconds=60))
    for name, found in items.items():
        assert "error" not in found and "warning" not in found, (name, found)
    for name in ("gae", "rloo_advantages", "token_logprobs, 1025 words, bf16"):
        assert items[name] == {"largest error": 0.0, "relative to the largest value": 0.0}
    assert items["sample_tokens"]["different tokens"] == 0
    padded = [found for name, found in items.items() if name.startswith("left padding")]
    assert padded and all(found["gradient, relative distance"] < 0.02 for found in padded)
    json.dumps(gpu.clean(items), allow_nan=False)


def test_updates_at_toy_size():
    """Of a script with a model that has only a config: those that fail most easily if a script changes."""
    found = gpu.update_memory("pythia-1b", "--lora-r 16", toy=True, device="cpu")
    assert found["seconds of the update"] > 0 and found["first log-ratio, largest"] < 0.2
    found = gpu.gpt2_imdb_updates(toy=True, device="cpu")
    assert found["updates measured"] == 2 and found["first log-ratio, largest"] < 0.2


# ---- gpu_rollout.py ----------------------------------------------------------------------------------------

PAGE = (ROOT / "docs/speed.md").read_text()
ROLLOUT = json.loads((ROOT / "results/gpu-rollout.json").read_text())


def cells(first):
    """The numbers of a table row of docs/speed.md that begins with this cell."""
    [row] = re.findall(rf"^\| {re.escape(first)} \|(.*)\|$", PAGE, re.M)
    return [cell.strip() for cell in row.split("|")]


def test_gpu_rollout_at_toy_size(tmp_path):
    """On a CPU with emulated recordings, which must be right: exit code 0."""
    out = tmp_path / "out.json"
    program = [sys.executable, ROOT / "benchmarks/gpu_rollout.py", out, "--toy", "--shapes", "qwen2.5-0.5b"]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
    found = json.loads(out.read_text())
    assert [found["right"][f"qwen2.5-0.5b, {x}"]["tokens_unlike_called"] for x in ("bf16", "fp32")] == [0, 0]
    assert found["step"].keys() == {"qwen2.5-0.5b, 8 rows", "qwen2.5-0.5b, 8 rows, own RMSNorm"}
    assert found["step"]["qwen2.5-0.5b, 8 rows"].keys() == {"ms_recorded", "ms_growing_cache", "gib"}
    tokens = [x["tokens"] for x in found["rollout"].values()]
    assert tokens[0] == tokens[1] == 160 > tokens[2] == tokens[3]
    assert len(found["logits"]) == 2


def test_the_page_has_the_numbers_of_the_rollout():
    steps, logits = ROLLOUT["step"], ROLLOUT["logits"]
    for first, shape, key in (
        ("Qwen2.5-0.5B, recorded", "qwen2.5-0.5b", "ms_recorded"),
        ("Qwen2.5-0.5B, growing cache", "qwen2.5-0.5b", "ms_growing_cache"),
        ("GPT-2 (124M), recorded", "gpt2-124m", "ms_recorded"),
    ):
        for rows, cell in zip((64, 256, 512, 1024), cells(first), strict=True):
            found = steps[f"{shape}, {rows} rows"]
            assert cell == (f"{found[key]:.1f}" if key in found else "")
    for name, key, digits in (("seconds", "seconds", 3), ("peak GiB", "gib", 1)):
        for rows, cell in zip((128, 512, 883, 2048, 8192), cells(name), strict=True):
            assert cell == f"{logits[f'{rows} rows at once'][key]:.{digits}f}"
    for rows, times in ((64, 8), (256, 6)):
        found = steps[f"qwen2.5-0.5b, {rows} rows"]
        assert round(found["ms_growing_cache"] / found["ms_recorded"]) == times
    for n in (128, 256, 512):
        seconds = ROLLOUT["rollout"][f"qwen2.5-0.5b, none ends early, rounds of {n}"]["seconds"]
        assert round(seconds, 1) == 2.7
    right = ROLLOUT["right"]
    assert [name for name, x in right.items() if x["tokens_unlike_called"]] == ["gpt2-124m, bf16"]
    gaps = right["gpt2-124m, bf16"]
    assert round(gaps["gap_recorded"], 4) == 0.0047 and abs(gaps["gap_called"] - gaps["gap_recorded"]) < 1e-4
