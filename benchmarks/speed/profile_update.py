"""Where one update spends its time: the third update of a script, under torch.profiler, which warms up in the second.

    python benchmarks/speed/profile_update.py rloo_tldr.py --total-episodes 384 --num-examples 1      # a script and its normal flags
    python benchmarks/speed/profile_update.py rloo --peers FOLDER --dtype bfloat16        # a job of compare.py (fp32 by default)
    python benchmarks/speed/profile_update.py rloo --peers FOLDER --save          # and a line in results/profiles.jsonl
    python benchmarks/speed/profile_update.py --show                              # the table of that file

Prints the operators by their own time, the shares of the kinds of them, and stops after the update. Operators are timed one by one, so
the update takes longer than without the profiler; the shares are what to read. Shapes are not recorded: for that the profiler holds on to
the tensors, gigabytes of them.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import compare
import torch

FILE = compare.HERE / "results" / "profiles.jsonl"
KINDS = {  # of operators, by the beginning of their names; what is left of the update is Python and the profiler itself
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::"),
    "attention": ("aten::_scaled_dot_product",),
    "softmax, sampling": ("aten::_softmax", "aten::_log_softmax", "aten::logsumexp", "aten::exp", "aten::cumsum", "aten::searchsorted"),
    "GELU, norms": ("aten::gelu", "aten::native_layer_norm", "aten::tanh"),
    "optimizer": ("aten::_fused_adam", "Optimizer.", "aten::_foreach"),
    "copies, gathers": ("aten::copy_", "aten::index", "aten::cat", "aten::gather", "aten::embedding", "aten::_embedding", "aten::clone"),
    "other operators": ("",),
}


def shares(events, seconds):
    """Self times by kind -> {kind: share of the update's seconds}."""
    found = dict.fromkeys(KINDS, 0.0)
    for event in (event for event in events if not event.key.startswith("ProfilerStep")):  # what is left of the update
        kind = next(kind for kind, starts in KINDS.items() if event.key.startswith(starts))
        found[kind] += event.self_cpu_time_total / 1e6 / seconds
    return found


def show():
    """The lines of the file as a table, and what they say of the results of compare.py."""
    lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    rows = [[line["job"], str(line["threads"]), f"{line['seconds']:.2f}"] for line in lines]
    parts = [[*line["shares"].values(), 1 - sum(line["shares"].values())] for line in lines]
    rows = [row + [f"{share:.0%}" for share in part] for row, part in zip(rows, parts)]
    print(compare.table(["a batch of", "threads", "s, profiled", *KINDS, "between operators"], rows))
    print(f"\n{bounds(lines)}")


def bounds(lines):
    """What a batch of ours could gain: if it were its matrix products alone, or the needed arithmetic at the speed of the measured one."""
    rows = []
    header = ["a batch of", "peer", "ours, s", "its products, s", "at full speed, s", "peer, s", "ratio", "of products", "of full speed"]
    for line in lines:
        runs = {}
        for run in map(json.loads, (FILE.parent / f"{line['job']}.jsonl").read_text().splitlines()):
            runs.setdefault(run["contestant"], []).append(compare.numbers(run))
        seconds = {who: median(row["s a batch"] for row in found) for who, found in runs.items()}
        ours, mfu = seconds["ours fp32"], median(row["useful MFU %"] for row in runs["ours fp32"]) / 100
        times = ours, ours * line["shares"]["matrix products"], ours * mfu
        for peer in (who for who in seconds if not who.startswith("ours")):
            cells = [f"{x:.2f}" for x in (*times, seconds[peer])] + [f"{seconds[peer] / x:.2f}" for x in times]
            rows.append([line["job"], peer, *cells])
    return compare.table(header, rows)


def profiled(script, flags, rows=30, save=None):
    """Run a script's main with these flags until its third update is over, and print the profile of that one.

    In the second one the profiler warms up. The memory of its records still faults, page by page, inside operators that take new memory,
    and counts as their time: zeros of an embedding's gradient and the softmax of generation show several times what they take by the clock.
    """
    spec = importlib.util.spec_from_file_location(Path(script).stem, script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by its name
    spec.loader.exec_module(module)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule)
    log, seen = module.Run.log, []

    def logged(run, *rest):  # the end of an update
        log(run, *rest)
        ended = time.perf_counter()
        if len(seen) < 2:
            (profile.step if seen else profile.start)()
            seen.append(time.perf_counter())
        else:
            profile.stop()
            seconds = ended - seen[1]
            print(f"\n{script} {' '.join(map(str, flags))}\nupdate 3: {seconds:.3f} s under the profiler")
            print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows, max_name_column_width=40))
            found = shares(profile.key_averages(), seconds)
            print(", ".join(f"{kind} {share:.0%}" for kind, share in found.items()))
            if save:
                line = dict(job=save, seconds=seconds, threads=torch.get_num_threads(), shares=found)
                with open(FILE, "a") as lines:
                    lines.write(json.dumps(line | dict(machine=compare.describe_machine(torch.get_num_threads()))) + "\n")
            sys.stdout.flush()
            os._exit(0)  # what would follow (more updates, the evaluation, the saved model) is not wanted

    module.Run.log = logged
    module.main([str(flag) for flag in flags])
    sys.exit("the run had less than three updates")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False, epilog="other flags go to the script")
    parser.add_argument("what", nargs="?", help="a script, or with --peers a job of compare.py")
    parser.add_argument("--peers", type=Path, help="the folder of install_peers.sh")
    parser.add_argument("--rows", help="sft and reward-model: a Hub name or a folder")
    parser.add_argument("--save", action="store_true", help="append the shares to results/profiles.jsonl")
    parser.add_argument("--show", action="store_true", help="print that file as a table, run nothing")
    args, flags = parser.parse_known_args()
    if args.show:
        return show()
    work = Path(tempfile.mkdtemp())
    if not args.peers:
        return profiled(args.what, [*flags, "--output-dir", work], save=args.save and args.what)
    job, models, rows = compare.JOBS[args.what], args.peers.resolve() / "models", work / "rows"
    if "rows" in job:
        rows.mkdir()
        compare.write_rows(job, args.rows or job["rows"], models, 3, rows)
    _, script, *command = compare.our_command(job, {}, models, rows, 3, work / "run")
    profiled(script, [*command, *flags], save=args.save and args.what)


if __name__ == "__main__":
    main()
