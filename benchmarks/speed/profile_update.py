"""Where one batch of a script spends its time. The third update is measured.

    python benchmarks/speed/profile_update.py rloo_tldr.py --total-episodes 512    # a script and its own flags
    python benchmarks/speed/profile_update.py rloo --peers FOLDER                  # a job of compare.py, in fp32
    python benchmarks/speed/profile_update.py rloo --peers FOLDER --save           # adds a line to the results
    python benchmarks/speed/profile_update.py --show                               # the tables of the results

A phase is some functions of the script, timed from outside. If a function of one phase calls one of another phase,
the inner time counts only for the inner phase. In the RL scripts, the gradient of the logits counts as "transformer,
backward". The results are in results/speed/profiles.jsonl.
"""

import argparse
import importlib.util
import inspect
import json
import os
import sys
import tempfile
import time
from collections import Counter
from functools import wraps
from pathlib import Path

import compare
import torch

FILE = compare.ROOT / "results/speed" / "profiles.jsonl"
# Of a script's functions, as far as it has them. The rest of an update: rewards, texts, sums for the log.
PHASES = {
    "generation": ("generate", "generate_groups", "generate_until"),
    "transformer, forward": (
        "response_logprobs",
        "group_logprobs",
        "PolicyAndValue.forward",
        "document_states",
        "sequence_logits",
        "shared_prompt_logits",
    ),
    "logits and their gradient": ("token_logprobs", "next_token_loss"),
    "transformer, backward": ("accelerate.Accelerator.backward",),
    "optimizer": (
        "accelerate.Accelerator.clip_grad_norm_",
        "accelerate.optimizer.AcceleratedOptimizer.step",
    ),
}


class Clock:
    """Seconds of each phase, less those of the phases that run inside it."""

    def __init__(self):
        self.seconds, self.open, self.since = Counter(), ["rest"], time.perf_counter()

    def turn(self):
        """What has passed belongs to the innermost phase."""
        now = time.perf_counter()
        self.seconds[self.open[-1]] += now - self.since
        self.since = now

    def time(self, owner, name, phase):
        """From now on count the calls of this function of a module or class."""
        function = getattr(owner, name)

        @wraps(function)
        def timed(*args, **kwargs):
            self.turn()
            self.open.append(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.turn()
                self.open.pop()

        static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(timed) if static else timed)


def show():
    """The lines of the file as a table."""
    rows = []
    for line in map(json.loads, FILE.read_text().splitlines()):
        seconds = line["seconds"]
        total = sum(seconds.values())
        shares = [f"{seconds.get(phase, 0) / total:.0%}" for phase in [*PHASES, "rest"]]
        rows.append([line["job"], line["dtype"], f"{total:.2f}", *shares])
    print(compare.table(["a batch of", "products in", "s", *PHASES, "rest"], rows))


def find(module, name):
    """The module or class that owns a function of this dotted name, and its last part; None where there is
    none."""
    *path, last = name.split(".")
    owner = module
    for part in path:
        owner = getattr(owner, part, None)
    return (owner, last) if hasattr(owner, last) else None


def profiled(script, flags, save=None):
    """Run a script's main with these flags until its third update is over, and print its phases."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by its name
    spec.loader.exec_module(module)
    clock = Clock()
    for phase, names in PHASES.items():
        for owner, name in filter(None, (find(module, name) for name in names)):
            clock.time(owner, name, phase)
    log = module.Run.log

    def logged(run, metrics):  # the end of an update
        clock.turn()
        metrics = log(run, metrics)
        if metrics["update"] == 3:
            total = sum(clock.seconds.values())
            print(f"\n{script} {' '.join(map(str, flags))}\nupdate 3: {total:.3f} s")
            for phase in [*PHASES, "rest"]:
                print(f"{phase} {clock.seconds[phase]:.3f} s, {clock.seconds[phase] / total:.0%}")
            if save:
                dtype = json.loads((Path(run.folder) / "args.json").read_text())["args"]["dtype"]
                machine = compare.describe_machine(torch.get_num_threads())
                line = dict(job=save, dtype=dtype, seconds=clock.seconds, machine=machine)
                with open(FILE, "a") as lines:
                    lines.write(json.dumps(line) + "\n")
            sys.stdout.flush()
            os._exit(0)  # what would follow (more updates, the evaluation, the saved model) is not wanted
        clock.turn()
        clock.seconds.clear()  # writing the log does not count
        return metrics

    module.Run.log = logged
    module.main([str(flag) for flag in flags])
    sys.exit("the run had fewer than three updates")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], allow_abbrev=False, epilog="other flags go to the script"
    )
    parser.add_argument("what", nargs="?", help="a script, or with --peers a job of compare.py")
    parser.add_argument("--peers", type=Path, help="the folder of install_peers.sh")
    parser.add_argument("--rows", type=Path, help="sft and reward-model: a folder with a copy of the data")
    parser.add_argument("--save", action="store_true", help="append the phases to the results")
    parser.add_argument("--show", action="store_true", help="print that file as tables, run nothing")
    args, flags = parser.parse_known_args()
    if args.show:
        return show()
    work, save = Path(tempfile.mkdtemp()), args.save and args.what
    if not args.peers:
        return profiled(args.what, [*flags, "--output-dir", work], save)
    job, models, rows = compare.JOBS[args.what], args.peers.resolve() / "models", work / "rows"
    if "rows" in job:
        compare.write_rows(job, args.rows or job["rows"], models, 4, rows)
    _, script, *command = compare.our_command(job, {}, models, rows, 4, work / "run")
    profiled(script, [*command, *flags], save)


if __name__ == "__main__":
    main()
