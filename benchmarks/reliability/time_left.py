"""Was the progress bar right about the time left? From the metrics.jsonl of finished runs: what it said after a tenth of the updates.

    python benchmarks/reliability/time_left.py                    # the committed runs of the three tiny recipes
    python benchmarks/reliability/time_left.py runs/*/*/          # yours

rich's bar divides the updates that are left by the speed of the last 30 seconds.
"""

import gzip
import json
import sys
from itertools import accumulate
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent


def said_and_true(file):
    """Seconds left after a tenth of the updates: as the bar says, and as it came."""
    with (gzip.open if file.suffix == ".gz" else open)(file, "rt") as lines:
        ends = list(accumulate(json.loads(line)["perf/seconds"] for line in lines))  # when each update was over
    tenth = len(ends) // 10 - 1
    before = max((i for i in range(tenth) if ends[i] <= ends[tenth] - 30), default=-1)
    speed = (tenth - before) / (ends[tenth] - (ends[before] if before >= 0 else 0.0))
    return (len(ends) - 1 - tenth) / speed, ends[-1] - ends[tenth]


def main():
    folders = [Path(name) for name in sys.argv[1:]] or sorted([*HOME.glob("*-tiny/seed*"), *HOME.glob("*-idle/seed*")])
    for file in sorted(file for folder in folders for file in folder.glob("metrics.jsonl*")):
        said, true = said_and_true(file)
        print(f"{file.parent.parent.name}/{file.parent.name}: {said:.0f} s said, {true:.0f} s it took, {said / true:.2f}")


if __name__ == "__main__":
    main()
