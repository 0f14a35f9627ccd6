"""The change of lines "Reward per turn" in docs/grpo_tools.md, on the game of the recipe guess.

    python benchmarks/turn_rewards.py    # -> results/grpo-tools-guess/turn-rewards.zip

It trains a copy of grpo_tools.py with the change, in runs/turn-rewards. A run that was stopped goes on.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

from archive import pack

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from diff_blocks import apply_block, blocks  # noqa: E402

RESULT = ROOT / "results/grpo-tools-guess/turn-rewards.zip"
FOLDER = ROOT / "runs/turn-rewards"
COMMAND = "grpo_tools.py guess --environment examples/guess_for_bits.py:GuessForBits --learning-rate 3e-4"
KEPT = ("args.json", "evaluation.json", "evaluation_samples.jsonl", "metrics.jsonl", "samples.jsonl")


def main():
    block = blocks((ROOT / "docs/grpo_tools.md").read_text())["Reward per turn"]
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "grpo_tools.py").write_text(apply_block((ROOT / "grpo_tools.py").read_text(), block))
    for part in ("data", "checkpoints", "examples"):
        if not (FOLDER / part).exists():
            (FOLDER / part).symlink_to(ROOT / part)
    words = shlex.split(COMMAND) + ["--output-dir", "run"]
    if (FOLDER / "run/args.json").exists():
        words = ["grpo_tools.py", "--resume", "run"]
    subprocess.run([sys.executable, *words], cwd=FOLDER, check=True)
    files = {name: (FOLDER / "run" / name).read_text() for name in KEPT}
    about = json.loads(files["args.json"]) | {"command": shlex.split(COMMAND)}
    files["args.json"] = json.dumps(about, indent=2)
    pack(RESULT, files)


if __name__ == "__main__":
    main()
