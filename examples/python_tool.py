"""A tool that runs Python code, which the policy writes, in a process of its own.

    python grpo_tools.py gsm8k-tools-qwen-0.5b --tools examples/python_tool.py:python \\
        --system-prompt "Solve it with Python." --tool-workers 8 --tool-timeout 20

The process has 5 seconds, 512 MB and an empty working directory. It can list folders, and read only the
files of the Python installation (with a system Python, all of /usr). It cannot write files, use the network
or start programs.

WARNING: this stops accidents, not attacks. The limits are set inside the same Python that runs the code, and
code that is written to break out of them can do so. A policy that is rewarded for a result may find a way
that you did not think of. Run untrusted code in a container or a virtual machine without network and secrets.
"""

import subprocess
import sys
import tempfile

SECONDS = 5
MEGABYTES = 512
MOST_CHARACTERS = 4_000  # of the output

# What runs before the code: limits of the operating system, then a hook that Python calls before it opens a
# file, a connection or a process.
GUARD = f"""
import os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, 2 * [{MEGABYTES} * 2**20])
resource.setrlimit(resource.RLIMIT_CPU, 2 * [{SECONDS}])
resource.setrlimit(resource.RLIMIT_FSIZE, 2 * [0])
resource.setrlimit(resource.RLIMIT_CORE, 2 * [0])
allowed = tuple(os.path.realpath(path) + os.sep for path in (sys.prefix, sys.base_prefix))
harmless = ("compile", "exec", "import", "marshal.", "object.__", "sys._getframe", "builtins.id",
            "os.listdir", "os.scandir", "code.__new__", "cpython.", "array.", "time.sleep")

def check(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        is_read = not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if isinstance(path, str) and is_read and os.path.realpath(path).startswith(allowed):
            return
    elif event.startswith(harmless):
        return
    raise PermissionError(f"{{event}} is not allowed")

code = sys.stdin.read()
sys.addaudithook(check)
exec(compile(code, "<code>", "exec"), {{"__name__": "__main__"}})
"""


def python(code: str) -> str:
    """Run Python code and return what it prints.

    Args:
        code: the program; use print to show results
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", GUARD],
                input=code,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                cwd=folder,
                env={},
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the program ran for more than {SECONDS} seconds") from None
    if done.returncode != 0:
        last_line = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise RuntimeError(last_line[:MOST_CHARACTERS])
    return done.stdout[:MOST_CHARACTERS]
