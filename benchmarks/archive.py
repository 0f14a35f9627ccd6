"""Read and write committed runs. A run is a folder, or NAME.zip with the files that the folder NAME would have.

By hand, without this file:

    python -m zipfile -e results/rloo-tiny/seed1.zip runs/rloo-tiny/seed1    # a folder for report.py
    python -m zipfile -c results/NAME.zip RUN/args.json RUN/metrics.jsonl RUN/evaluation.json
"""

import atexit
import gzip
import json
import tempfile
import zipfile
from pathlib import Path

UNPACKED = tempfile.TemporaryDirectory(prefix="runs-")
atexit.register(UNPACKED.cleanup)


def run_folder(path):
    """The folder of a run. path: NAME or NAME.zip, which is unpacked for as long as this program runs."""
    name = str(Path(path).resolve()).removesuffix(".zip")
    if not Path(f"{name}.zip").exists():
        return Path(path)
    folder = Path(f"{UNPACKED.name}{name}")
    if not folder.exists():
        with zipfile.ZipFile(f"{name}.zip") as archive:
            archive.extractall(folder)
    return folder


def read(run, name):
    """The text of a file of a run, also if it is compressed."""
    path = run_folder(run) / name
    if path.exists():
        return path.read_text(encoding="utf-8")
    return gzip.decompress(Path(f"{path}.gz").read_bytes()).decode()


def read_rows(run, name):
    """The rows of a JSON Lines file of a run. -> list of dicts"""
    return [json.loads(line) for line in read(run, name).splitlines()]


def pack(path, files):
    """Write a run as one file. path: NAME.zip; files: name -> text"""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name in sorted(files):
            about = zipfile.ZipInfo(name)  # without today's date: the same files give the same bytes
            archive.writestr(about, files[name], zipfile.ZIP_DEFLATED, compresslevel=9)
