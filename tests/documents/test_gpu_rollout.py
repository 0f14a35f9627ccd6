"""The numbers of benchmarks/gpu_rollout.py in docs/speed.md."""

import json
import re

from conftest import ROOT

PAGE = (ROOT / "docs/speed.md").read_text()
ROLLOUT = json.loads((ROOT / "results/gpu-rollout.json").read_text())


def cells(first):
    """The numbers of a table row of docs/speed.md that begins with this cell."""
    [row] = re.findall(rf"^\| {re.escape(first)} \|(.*)\|$", PAGE, re.M)
    return [cell.strip() for cell in row.split("|")]


def test_the_page_has_the_numbers_of_the_rollout():
    steps = ROLLOUT["step"]
    for first, shape, key in (
        ("Qwen2.5-0.5B, recorded", "qwen2.5-0.5b", "ms_recorded"),
        ("Qwen2.5-0.5B, growing cache", "qwen2.5-0.5b", "ms_growing_cache"),
        ("GPT-2 (124M), recorded", "gpt2-124m", "ms_recorded"),
    ):
        for rows, cell in zip((64, 256, 512, 1024), cells(first), strict=True):
            found = steps[f"{shape}, {rows} rows"]
            assert cell == (f"{found[key]:.1f}" if key in found else "")
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
