"""Copies functions and classes from one script into all others that have one of the same name.

    python tests/documents/copy_shared.py ppo_sentiment.py              # everything that it shares
    python tests/documents/copy_shared.py ppo_sentiment.py gae generate

test_contract.py enforces that the copies are equal; this makes them so. ppo_minimal.py gets only
the functions that it has in full.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(ROOT / "tests"))
from test_contract import MAY_DIFFER, SCRIPTS, SHORTENED, definitions  # noqa: E402


def copy_shared(source, names):
    """source: the file name of a script; names: what to copy (empty: everything that another script has)"""
    ours = definitions((ROOT / source).read_text())
    for path in [ROOT / f"{script}.py" for script in (*SCRIPTS, "ppo_minimal")]:
        text = path.read_text()
        for name, theirs in definitions(text).items():
            is_wanted = name in names or not names and name not in MAY_DIFFER
            if path.stem == "ppo_minimal" and name in SHORTENED:
                is_wanted = False
            if is_wanted and name in ours and ours[name] != theirs:
                text = text.replace(theirs, ours[name])
                print(f"{path.name}: {name}")
        path.write_text(text)


if __name__ == "__main__":
    copy_shared(sys.argv[1], sys.argv[2:])
