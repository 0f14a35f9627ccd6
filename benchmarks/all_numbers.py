"""The numbers of the README, the docs and the figures: what makes them, how long it takes, and when it last ran.

    python benchmarks/all_numbers.py                           # the table of results/README.md
    python benchmarks/all_numbers.py --older-than COMMIT       # what last ran before this commit, and its hours
    python benchmarks/all_numbers.py --older-than COMMIT --run --jobs 2     # runs it, each run on one core
    python benchmarks/all_numbers.py --make                    # figures and files that are made of results
    python benchmarks/all_numbers.py --write                   # the table, and what the pages say is old
    python benchmarks/all_numbers.py --measured RESULT --minutes 3   # note the newest commit for one made by hand

The list is all_numbers.toml; runs are started in its order. results/measured.jsonl has the commit and the CPU time of each
result. Without --run, nothing is run. --only NAME: one entry. For a night:

    nohup python benchmarks/all_numbers.py --older-than COMMIT --run --jobs 2 > numbers.log 2>&1 &

Runs take place in a copy of the newest commit, runs/numbers/COMMIT, so that changes of the working tree do not reach
them. When a run ends, its result is copied to results/. It needs nothing but a CPU, or what a variable like $TRL
names, which must be set. To stop, `kill` this program: scripts save a checkpoint. The same command goes on, as long
as the newest commit is the same, or with --at COMMIT.

The pages are not changed, but for --write. Their tests say which numbers are others now.
"""

import argparse
import fcntl
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from archive import pack

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "benchmarks/all_numbers.toml"
TABLE = ROOT / "results/README.md"
MEASURED = ROOT / "results/measured.jsonl"
EDITION = "2026-11-29T11:16:03Z"  # of 32ae99a, the sixth edition: pages say what is older
KEPT = ("args.json", "evaluation.json", "evaluation_samples.jsonl", "metrics.jsonl", "samples.jsonl")
KEPT_OF_HEALTHY_RUNS = ("args.json", "evaluation.json", "metrics.jsonl")
STOPPED = threading.Event()
WRITING = threading.Lock()


# ---- The list ----------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A command and what it leaves."""

    result: str  # NAME.zip or a folder, with files of a run; or another file
    command: str
    step: str  # its name in the folder of the copy


def expand(pattern):
    """a{1-2} -> [("a1", "1"), ("a2", "2")]; {a, b} likewise"""
    braces = re.search(r"\{(.*?)\}", pattern)
    if not braces:
        return [(pattern, "")]
    words = braces[1].split(", ")
    if numbers := re.fullmatch(r"(\d+)-(\d+)", braces[1]):
        words = [str(x) for x in range(int(numbers[1]), int(numbers[2]) + 1)]
    return [(pattern.replace(braces[0], word), word) for word in words]


def load_entries():
    """-> list of dicts, as in all_numbers.toml; in addition, `expanded` has a Run for each result"""
    entries = tomllib.loads(LIST.read_text())["entries"]
    for entry in entries:
        entry.setdefault("needs", "")
        entry["made"] = {
            path: command for key, command in entry.get("made", {}).items() for path, _ in expand(key)
        }
        entry["expanded"] = []
        for pattern, command in entry["runs"]:
            for result, word in expand(pattern):
                name = result.removeprefix("results/") or f"{entry['name']} {len(entry['expanded'])}"
                step = re.sub(r"[^\w.-]", "-", name)
                entry["expanded"].append(Run(result, command.replace("{}", word), step))
    return entries


def read_measured():
    """-> dict: result -> dict with commit, date and minutes of CPU time"""
    rows = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    return {row.pop("result"): row for row in rows}


def write_measured(measured):
    lines = [json.dumps({"result": result} | measured[result]) for result in sorted(measured)]
    MEASURED.write_text("\n".join(lines) + "\n")


def date_of(commit):
    """The date of a commit, in UTC."""
    words = ["git", "show", "-s", "--date=format-local:%Y-%m-%dT%H:%M:%SZ", "--format=%cd", commit]
    return subprocess.check_output(words, cwd=ROOT, env=os.environ | {"TZ": "UTC"}, text=True).strip()


def older(entry, measured, date):
    """The runs of an entry whose result is older, or was never measured."""
    runs = [run for run in entry["expanded"] if run.result]
    return [run for run in runs if measured.get(run.result, {"date": ""})["date"] < date]


def minutes(runs, measured):
    """CPU time, as far as it is known."""
    return sum(measured.get(run.result, {}).get("minutes", 0) for run in runs)


def commits(runs, measured):
    """The commits of these runs, each once, the oldest first."""
    rows = [measured[run.result] for run in runs if run.result in measured]
    return list(dict.fromkeys(row["commit"] for row in sorted(rows, key=lambda row: row["date"])))


# ---- The table, and what the pages say is old --------------------------------------------------------------


def table(entries, measured):
    """One row per entry, as markdown."""
    lines = [
        "| what | shown in | results and commands | minutes | needs | commit |",
        "|---|---|---|---|---|---|",
    ]
    for entry in entries:
        pages = [f"[{Path(x.split('#')[0]).stem}](../{x})" for x in entry["shown"]]
        parts = []
        for result, command in entry["runs"]:
            names = [
                f"`{result.removeprefix('results/')}`" if result else "",
                f"`{command}`" if command else "",
            ]
            parts.append(": ".join(name for name in names if name))
        text = "<br>".join(parts)
        if "note" in entry:
            text += f"<br>({entry['note']})"
        time = minutes(entry["expanded"], measured)
        cells = [
            entry["name"],
            ", ".join(pages),
            text,
            f"{time:.0f}" if time else "",
            entry["needs"],
            ", ".join(commits(entry["expanded"], measured)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_table(page, entries, measured):
    """results/README.md with today's table."""
    start, end = "<!-- the table -->\n", "\n<!-- end of the table -->"
    before, rest = page.split(start)
    return before + start + table(entries, measured) + end + rest.split(end)[1]


OLD = "*From earlier versions of the scripts"


def without_marks(page):
    return re.sub(rf"\n{re.escape(OLD)}.*?(?:\n(?=\n)|\Z)", "", page, flags=re.S)


def sections(page):
    """Headings, with the lines up to the next one. -> list of (anchor, level, first line, end)"""
    found, is_code = [], False
    lines = page.split("\n")
    for i, line in enumerate(lines):
        is_code ^= line.startswith("```")
        if heading := re.match(r"(#+) (.*)", line):
            if not is_code:
                anchor = re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-")
                found.append((anchor, len(heading[1]), i))
    ends = [start for _, _, start in found[1:]] + [len(lines)]
    return [(*section, end) for section, end in zip(found, ends)]


def with_marks(name, page, entries, measured):
    """A page that says, in each section, which of its results are older than this edition, and of which commit.

    The mark comes after the last table or figure of the section, or at its end.
    """
    lines = without_marks(page).split("\n")
    link = f"{'../' * name.count('/')}results/README.md"
    for anchor, _, start, end in reversed(sections("\n".join(lines))):
        old = []
        for entry in entries:
            runs = older(entry, measured, EDITION)
            if f"{name}#{anchor}" in entry["shown"] and runs:
                old.append(f"{entry['name']} ({', '.join(commits(runs, measured))})")
        if old:
            at = max(i for i in range(start, end) if lines[i].strip() and not lines[i].startswith("<a id="))
            shown = [i for i in range(start, end) if lines[i].startswith(("|", "!["))]
            at = max(shown, default=at)
            text = f"{OLD} ([list]({link})): {', '.join(old)}.*"
            lines[at + 1 : at + 1] = ["", *textwrap.wrap(text, 140, break_on_hyphens=False)]
    return "\n".join(lines)


def pages(entries):
    """The pages that show numbers."""
    return sorted({place.split("#")[0] for entry in entries for place in entry["shown"]})


# ---- Runs --------------------------------------------------------------------------------------------------


def copy_of(commit):
    """A folder with the files of a commit, and the reward function of the README."""
    folder = ROOT / "runs/numbers" / commit
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", part], input=archive.stdout, check=True)
        [function] = re.findall(r"^    def score\(.*\n(?:     .*\n)+", (part / "README.md").read_text(), re.M)
        (part / "my_reward.py").write_text(textwrap.dedent(function))
        (part / "runs").mkdir()
        part.rename(folder)
    return folder


def folder_of(run, project):
    """-> the folder of its run, if the command is a script or gets it as $OUT; is it a script?"""
    words = run.command.split()
    is_script = (
        words[0] == "python" and (project / words[1]).parent == project and words[1] != "ppo_minimal.py"
    )
    folder = words[words.index("--output-dir") + 1] if "--output-dir" in words else f"runs/{run.step}"
    return (folder if is_script or "$OUT" in words else None), is_script


def process_of(run, project, lock):
    """Start a command. A script that was stopped goes on."""
    folder, is_script = folder_of(run, project)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    environment["OUT"] = str(folder)
    command = re.sub(r"\$(\w+)", lambda found: shlex.quote(environment[found[1]]), run.command)
    words = shlex.split(command)
    while "=" in words[0]:
        name, _, environment[name] = words.pop(0).partition("=")
    if words[0] == "python":
        words[0] = sys.executable
    if is_script and "--output-dir" not in words:
        words += ["--output-dir", folder]
    if is_script and (project / folder / "args.json").exists():
        words = [*words[:2], "--resume", folder]
    elif folder:
        shutil.rmtree(project / folder, ignore_errors=True)
    options = dict(cwd=project, env=environment, stderr=subprocess.STDOUT)
    options |= dict(start_new_session=True, pass_fds=[lock])  # the lock lasts as long as its last process
    with open(project / f"runs/{run.step}.log", "w") as log:
        return subprocess.Popen(words, stdout=log, **options)


def keep(run, project, commit):
    """Copy what a run left to its place in results/."""
    target, made = ROOT / run.result, project / run.result
    folder, _ = folder_of(run, project)
    if folder is None:
        if made.suffix == ".txt":  # what the program printed
            made = project / f"runs/{run.step}.log"
        shutil.copyfile(made, target)
        return
    source = project / folder
    if target.suffix == ".json":
        shutil.copyfile(source / "evaluation.json", target)
        return
    names = KEPT_OF_HEALTHY_RUNS if "healthy" in run.result else KEPT
    files = {name: (source / name).read_text() for name in names if (source / name).exists()}
    about = json.loads(files["args.json"]) | {"command": shlex.split(run.command)[1:], "commit": commit}
    files["args.json"] = json.dumps(about, indent=2)
    if target.suffix == ".zip":
        pack(target, files)
        return
    for name, text in files.items():  # a folder keeps the files that it has
        if (target / f"{name}.gz").exists():
            (target / f"{name}.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        elif (target / name).exists():
            (target / name).write_text(text)


def state_of(run, project):
    """What is known of a run in this copy. -> file, dict"""
    file = project / f"runs/{run.step}.json"
    return file, json.loads(file.read_text()) if file.exists() else {
        "is_done": False,
        "minutes": 0,
        "peak_mb": 0,
    }


def execute(run, project, lock, running):
    """Run a command, and note its time. -> is it finished?"""
    file, state = state_of(run, project)
    if state["is_done"]:
        return True
    file.write_text(json.dumps(state))
    process = process_of(run, project, lock)
    running.add(process)
    _, status, usage = os.wait4(process.pid, 0)
    running.discard(process)
    process.returncode = os.waitstatus_to_exitcode(status)
    state["is_done"] = process.returncode == 0
    state["minutes"] += (usage.ru_utime + usage.ru_stime) / 60
    state["peak_mb"] = max(state["peak_mb"], usage.ru_maxrss // 1024)
    file.write_text(json.dumps(state))
    if state["is_done"]:
        print(f"{run.step}: {state['minutes']:.1f} minutes", flush=True)
    elif STOPPED.is_set():
        print(f"stopped: {run.step}", flush=True)
    else:
        log = project / f"runs/{run.step}.log"
        print(f"FAILED: {run.step}, see {log}\n{log.read_text()[-600:]}", flush=True)
    return state["is_done"]


def can_run(entry, run):
    """Is it a command that needs a CPU alone, or variables that are set?"""
    variables = set(re.findall(r"\$(\w+)", run.command)) - {"OUT"}
    needs = set(entry["needs"].split(", ")) - {"", "TRL"}
    return bool(run.command) and not needs and variables <= set(os.environ)


def run_all(entries, date, commit, jobs, lock):
    """Run everything that is older and can be run, `jobs` at a time. -> runs that failed"""
    measured, commit_date = read_measured(), date_of(commit)
    if commit_date < date:
        sys.exit(f"{commit} is older itself")
    project = copy_of(commit)
    chains = []  # runs that need those before
    for entry in entries:
        todo = [run for run in older(entry, measured, date) if can_run(entry, run)]
        if entry.get("in_order") and todo:
            chains.append(entry["expanded"])
        elif todo:
            chains += [[run] for run in todo]
    running, failed = set(), []

    def stop(*_):
        STOPPED.set()
        for process in list(running):
            os.killpg(process.pid, signal.SIGTERM)

    def run_chain(chain):
        if not state_of(chain[0], project)[0].exists():
            for run in chain:  # programs skip what is there
                if (project / run.result).is_file():
                    (project / run.result).unlink()
        for run in chain:
            if STOPPED.is_set():
                return
            if not execute(run, project, lock, running):
                failed.append(run)
                return
            if run.result:
                keep(run, project, commit)
                _, state = state_of(run, project)
                about = {"commit": commit, "date": commit_date, "minutes": round(state["minutes"], 3)}
                with WRITING:
                    write_measured(read_measured() | {run.result: about | {"peak_mb": state["peak_mb"]}})

    signal.signal(signal.SIGTERM, stop)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop)
    with ThreadPoolExecutor(jobs) as pool:
        for end in [pool.submit(run_chain, chain) for chain in chains]:
            end.result()
    return failed


def note_measured(paths, commit, minutes):
    """Results of programs that were run by hand at this commit. minutes: of each; None: not known"""
    about = {"commit": commit, "date": date_of(commit)}
    if minutes is not None:
        about["minutes"] = minutes
    write_measured(read_measured() | {path: about for path in paths})


def show(entries, date):
    """Print what is older."""
    measured, total, sum_here = read_measured(), 0, 0
    for entry in entries:
        runs = older(entry, measured, date)
        if runs:
            hours = minutes(runs, measured) / 60 or entry.get("hours", 0)
            is_here = all(can_run(entry, run) for run in runs)
            total, sum_here = total + hours, sum_here + hours * is_here
            needs = "" if is_here else f"  needs {entry['needs']}"
            print(f"{hours:6.1f} h  {entry['name']} ({', '.join(commits(runs, measured))}){needs}")
    print(f"{sum_here:6.1f} h of one core can be run here, of {total:.1f} h that are known")


def main():
    parser = argparse.ArgumentParser(description="What makes the numbers of the docs, and when it last ran.")
    parser.add_argument("--older-than", metavar="COMMIT", help="what last ran before this commit")
    parser.add_argument("--run", action="store_true", help="run it")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--at", default="HEAD", metavar="COMMIT", help="the version to run")
    parser.add_argument("--only", metavar="NAME", help="only this entry")
    parser.add_argument("--make", action="store_true", help="make figures and files of results")
    parser.add_argument("--write", action="store_true", help="write the table and the marks of the pages")
    parser.add_argument(
        "--measured", nargs="+", metavar="RESULT", help="results that were made by hand, --at COMMIT"
    )
    parser.add_argument("--minutes", type=float, help="for --measured: CPU time of each, if known")
    flags = parser.parse_args()
    entries = load_entries()
    chosen = [entry for entry in entries if flags.only in (None, entry["name"])]
    if not chosen:
        parser.error(f"--only: one of {', '.join(entry['name'] for entry in entries)}")
    commit = subprocess.check_output(["git", "rev-parse", "--short=7", flags.at], cwd=ROOT, text=True).strip()
    if flags.older_than and flags.run:
        (ROOT / "runs/numbers").mkdir(parents=True, exist_ok=True)
        with open(ROOT / "runs/numbers/lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                sys.exit("this program, or a run that it started, is still at work")
            failed = run_all(chosen, date_of(flags.older_than), commit, flags.jobs, lock.fileno())
        sys.exit(bool(failed))
    if flags.older_than:
        show(chosen, date_of(flags.older_than))
    elif flags.measured:
        note_measured(flags.measured, commit, flags.minutes)
    elif flags.make:
        for command in dict.fromkeys(command for entry in chosen for command in entry["made"].values()):
            print(command, flush=True)
            subprocess.run([sys.executable, *shlex.split(command)[1:]], cwd=ROOT)
    elif flags.write:
        measured = read_measured()
        for name in pages(entries):
            page = (ROOT / name).read_text()
            (ROOT / name).write_text(with_marks(name, page, entries, measured))
        TABLE.write_text(with_table(TABLE.read_text(), entries, measured))
    else:
        print(table(chosen, read_measured()))


if __name__ == "__main__":
    main()
