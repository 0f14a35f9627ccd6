"""Record a default run in a terminal, and draw it as an animated picture.

    pip install asciinema==2.4.0 termtosvg==1.1.0
    python benchmarks/record.py                 # ppo_sentiment.py, about 3 minutes -> docs/terminal.svg

The picture plays SPEED times as fast as the run. Nothing else is changed: it is what the terminal showed.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, LINES = 100, 36
SPEED = 12
FRAME = 150  # milliseconds in the picture: how often it changes at most
PAUSE = 9000  # milliseconds for which the last frame stays


def record(script, cast):
    """Run a script in a terminal of this size. What it prints goes to the file cast, with times."""
    with tempfile.TemporaryDirectory() as folder:
        words = f"{Path(sys.executable).name} {script}.py"
        command = f"echo '$ {words}'; {sys.executable} {script}.py --output-dir {folder}/run"
        size = ["--cols", str(COLUMNS), "--rows", str(LINES)]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TERM": "xterm-256color",
            "COLUMNS": str(COLUMNS),
        }
        subprocess.run(
            ["asciinema", "rec", "--overwrite", "--quiet", *size, "--command", command, str(cast)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,  # nobody types
            check=True,
        )
        text = cast.read_text().replace(f"{folder}/run", f"runs/{script}")
    cast.write_text(text)


def play_faster(cast):
    """Divide all times by SPEED."""
    header, *events = cast.read_text().splitlines()
    lines = [header]
    for event in events:
        time, kind, text = json.loads(event)
        lines.append(json.dumps([time / SPEED, kind, text]))
    cast.write_text("\n".join(lines) + "\n")


def main():
    output = ROOT / "docs/terminal.svg"
    with tempfile.TemporaryDirectory() as folder:
        cast = Path(folder) / "run.cast"
        record("ppo_sentiment", cast)
        play_faster(cast)
        limits = ["--min-frame-duration", str(FRAME), "--loop-delay", str(PAUSE)]
        subprocess.run(["termtosvg", "render", str(cast), str(output), *limits], check=True)
    print(f"{output}: {output.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
