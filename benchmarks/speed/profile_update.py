"""Where one update spends its time: the second update of a script, under torch.profiler.

    python benchmarks/speed/profile_update.py rloo_tldr.py --total-episodes 256 --num-examples 1      # a script and its normal flags
    python benchmarks/speed/profile_update.py rloo --peers FOLDER --dtype bfloat16        # a job of compare.py (fp32 by default)

Prints the operators by their own time and stops after the update. Operators are timed one by one, so the update takes longer than without
the profiler; the shares are what to read. Shapes are not recorded: for that the profiler holds on to the tensors, gigabytes of them.
"""

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path

import compare
import torch


def profiled(script, flags, rows=30):
    """Run a script's main with these flags until its second update is over, and print the profile of that one."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by its name
    spec.loader.exec_module(module)
    log, profile, seen = module.Run.log, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), []

    def logged(run, *rest):  # the end of an update
        log(run, *rest)
        seen.append(time.perf_counter())
        if len(seen) == 1:
            profile.start()
        else:
            profile.stop()
            print(f"\n{script} {' '.join(map(str, flags))}\nupdate 2: {seen[1] - seen[0]:.3f} s under the profiler")
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows, max_name_column_width=40))
            sys.stdout.flush()
            os._exit(0)  # what would follow (more updates, the evaluation, the saved model) is not wanted

    module.Run.log = logged
    module.main([str(flag) for flag in flags])
    sys.exit("the run had less than two updates")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False, epilog="other flags go to the script")
    parser.add_argument("what", help="a script, or with --peers a job of compare.py")
    parser.add_argument("--peers", type=Path, help="the folder of install_peers.sh")
    parser.add_argument("--rows", help="sft and reward-model: a Hub name or a folder")
    args, flags = parser.parse_known_args()
    work = Path(tempfile.mkdtemp())
    if not args.peers:
        return profiled(args.what, [*flags, "--output-dir", work])
    job, models, rows = compare.JOBS[args.what], args.peers.resolve() / "models", work / "rows"
    if "rows" in job:
        rows.mkdir()
        compare.write_rows(job, args.rows or job["rows"], models, 3, rows)
    _, script, *command = compare.our_command(job, {}, models, rows, 2, work / "run")
    profiled(script, [*command, *flags])


if __name__ == "__main__":
    main()
