"""Copies functions and classes from one script into all others that have one of the same name.

    python tests/documents/copy_shared.py ppo_sentiment.py              # everything but VERSIONS
    python tests/documents/copy_shared.py ppo_sentiment.py gae masked_mean
    python tests/documents/copy_shared.py rloo_tldr.py generate --to grpo_math grpo_tools

test_contract.py enforces that the copies are equal; this makes them so. ppo_minimal.py gets only
the functions that it has in full.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(ROOT / "tests"))
from test_contract import SCRIPTS, SHORTENED, VERSIONS, definitions  # noqa: E402


def copy_shared(source, names, to):
    """source: the file name of a script; names: what to copy (empty: everything that another script has); to:
    into which scripts"""
    ours = definitions((ROOT / source).read_text())
    for path in [ROOT / f"{script}.py" for script in to]:
        text = path.read_text()
        for name, theirs in definitions(text).items():
            is_wanted = name in names or not names and name not in VERSIONS
            if path.stem == "ppo_minimal" and name in SHORTENED:
                is_wanted = False
            if is_wanted and name in ours and ours[name] != theirs:
                text = text.replace(theirs, ours[name])
                print(f"{path.name}: {name}")
        path.write_text(text)


if __name__ == "__main__":
    source, *names = sys.argv[1:]
    to = [*SCRIPTS, "ppo_minimal"]
    if "--to" in names:
        place = names.index("--to")
        names, to = names[:place], names[place + 1 :]
    copy_shared(source, names, to)
