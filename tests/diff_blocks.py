"""The changes of lines that the docs show, applied to a source."""

import re


def blocks(page):
    """The diff blocks of a page that have a title. -> dict: title -> text"""
    return dict(re.findall(r"^\*\*([^*]+?)\.?\*\*(?:(?!^\*\*).)*?```diff\n(.*?)```", page, re.M | re.S))


def apply_block(source, block):
    """The old lines of each hunk must be in the source exactly once. -> the changed source"""
    for hunk in re.split(r"^@@.*\n", block, flags=re.M)[1:]:
        lines = hunk.splitlines()
        old = "\n" + "".join(line[1:] + "\n" for line in lines if not line.startswith("+"))
        new = "\n" + "".join(line[1:] + "\n" for line in lines if not line.startswith("-"))
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source
