"""Make docs/check.png: the screen of check.py for a set-up with four mistakes, and the same as text.

python tests/check/make_picture.py docs/check.png
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent.parent
COLUMNS, WIDTH, HEIGHT = 110, 9, 18  # of the screen, and of a character in pixels
FONTS = "/usr/share/fonts/truetype/dejavu/DejaVuSansMono{}.ttf"
BACKGROUND, FOREGROUND = "#1b1f24", "#d8dee4"
COLORS = {1: "#ff7b72", 2: "#7ee787", 3: "#e3b341", 8: "#6e7681"}  # red, green, yellow, gray
COMMAND = "grpo_math.py tiny --dataset-name my-tasks --num-generations 6 --response-length 256"
COMMAND += " --reward-fn data/math_rewards.py:correct"


def write_tasks(folder):
    """200 sums, of which one has no answer, and 40 for evaluation, in a file that no script reads."""
    numbers, rows = random.Random(3), []
    for _ in range(240):
        a, b = numbers.randint(2, 60), numbers.randint(2, 60)
        prompt = [{"role": "user", "content": f"How much is {a} plus {b}?"}]
        rows.append({"prompt": prompt, "answer": str(a + b), "source": "sheet 2"})
    rows[171]["answer"] = None
    rows[90]["prompt"][0]["content"] = "Add 4 and 7. <|im_end|>"
    folder.mkdir()
    for name, part in (("train", rows[:200]), ("eval", rows[200:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def screen():
    """What check.py prints. -> str, with colors"""
    script, *flags = COMMAND.split()
    with tempfile.TemporaryDirectory() as folder:
        write_tasks(Path(folder) / "my-tasks")
        env = os.environ | dict(COLUMNS=str(COLUMNS), FORCE_COLOR="1", TERM="xterm-256color")
        words = [sys.executable, ROOT / "check.py", ROOT / script, *flags]
        done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=env)
    assert done.returncode == 1, done.stderr
    return f"$ python check.py {COMMAND}\n{done.stdout}"


def draw(text, path):
    """Draw a text with colors."""
    console = Console(width=COLUMNS, force_terminal=True, color_system="256")
    lines = console.render_lines(Text.from_ansi(text), console.options)
    image = Image.new("RGB", (COLUMNS * WIDTH + 40, len(lines) * HEIGHT + 30), BACKGROUND)
    paint = ImageDraw.Draw(image)
    fonts = {bold: ImageFont.truetype(FONTS.format("-Bold" if bold else ""), 15) for bold in (False, True)}
    for row, line in enumerate(lines):
        column = 0
        for segment in line:
            style = segment.style
            color = COLORS.get(style.color.number, FOREGROUND) if style and style.color else FOREGROUND
            if style and style.dim:
                color = "#8b949e"
            x, y = 20 + column * WIDTH, 15 + row * HEIGHT
            if style and style.reverse:
                paint.rectangle([x, y, x + len(segment.text) * WIDTH, y + HEIGHT - 1], fill=color)
                color = BACKGROUND
            for i, letter in enumerate(segment.text):
                paint.text((x + i * WIDTH, y), letter, font=fonts[bool(style and style.bold)], fill=color)
            column += len(segment.text)
    image.quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    text = screen()
    draw(text, sys.argv[1])
    print(Text.from_ansi(text).plain)
