"""Update after update of ppo_sentiment.py's tiny recipe: does anything grow?

    python benchmarks/reliability/soak.py --minutes 60        # writes results/reliability/soak.json; exit
    code 1 if memory or open files grew

The recipe as it is, with more episodes, a checkpoint every 20 updates, and a SIGTERM when the time is over.
After each update, when the garbage is collected: anonymous resident memory (RssAnon: what the process
holds; the pages of its libraries, which the kernel may drop and read again as it likes, are not in it),
open files, threads, seconds of the update by the clock and of the processor. Compared are the medians of
the second and the last tenth of the updates: memory not more than 2 % up, open files equal, processor time
not more than 10 % up. The clock is for reading only: other jobs on the machine move it.
"""

import argparse
import gc
import json
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))
import ppo_sentiment  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--out", default=str(HERE.parent.parent / "results/reliability/soak.json"))
    given = parser.parse_args()
    process, rows, began, log, used = (
        psutil.Process(),
        [],
        time.time(),
        ppo_sentiment.Run.log,
        [time.process_time()],
    )

    def logged(self, metrics, *rest):
        log(self, metrics, *rest)
        gc.collect()
        used.append(time.process_time())
        held = int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**10
        rows.append(dict(update=metrics["update"], held_mb=held, rss_mb=process.memory_info().rss / 2**20, open_files=process.num_fds(),
                         threads=process.num_threads(), seconds=metrics["perf/seconds"],
                         processor_seconds=used[-1] - used[-2]))  # fmt: skip
        if time.time() - began > 60 * given.minutes:
            os.kill(os.getpid(), signal.SIGTERM)

    ppo_sentiment.Run.log = logged
    with tempfile.TemporaryDirectory() as folder:
        try:
            ppo_sentiment.main(
                ["--total-episodes", "100000000", "--output-dir", f"{folder}/run", "--save-every", "20"]
            )
        except SystemExit as end:
            code = end.code
    tenth = max(1, len(rows) // 10)
    parts = rows[tenth : 2 * tenth], rows[-tenth:]
    early, late = ({name: statistics.median(row[name] for row in part) for name in rows[0]} for part in parts)
    result = dict(command=f"python benchmarks/reliability/soak.py --minutes {given.minutes:g}", updates=len(rows), exit=code,
                  hours=round((time.time() - began) / 3600, 3), second_tenth=early, last_tenth=late,
                  memory_growth=late["held_mb"] / early["held_mb"] - 1,
                  time_growth=late["processor_seconds"] / early["processor_seconds"] - 1,
                  most_open_files=max(row["open_files"] for row in rows),
                  every_tenth_update=rows[::10])  # fmt: skip
    flat = (
        result["memory_growth"] < 0.02
        and result["time_growth"] < 0.1
        and late["open_files"] == early["open_files"]
    )
    Path(given.out).write_text(json.dumps(result | dict(flat=flat), indent=1) + "\n")
    print(
        {name: x for name, x in result.items() if name != "every_tenth_update"},
        "flat" if flat else "NOT FLAT",
    )
    sys.exit(not flat)


if __name__ == "__main__":
    main()
