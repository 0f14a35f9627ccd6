"""Fixtures for tests of whole runs: small runs of each script, about a second each."""

import json
import shutil
import signal
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_tools import ALL, BY_HEART, forget_reward_files, maker, rows_of, write_rows


@contextmanager
def handlers_kept():
    """A run installs its own signal handlers. Restore the old ones afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def signal_handlers():
    """Every test leaves the signal handlers unchanged."""
    with handlers_kept():
        yield


@pytest.fixture(autouse=True)
def reward_files(tmp_path_factory):
    """Every test may have a file reward.py of its own."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    forget_reward_files(tmp_path_factory.getbasetemp())


@pytest.fixture
def script(request, scripts):
    """The module of the script that a test file names as its SCRIPT."""
    return scripts[request.module.SCRIPT]


@pytest.fixture
def small(scripts, world, tmp_path):
    """small(script, folder="run", **changes) -> Args of a small run, whose folder is in tmp_path."""
    return maker(scripts, world, tmp_path)


def small_fixture(script):
    """A fixture: run(folder="run", **changes) trains -> (model, run folder, rows of metrics.jsonl)."""

    @pytest.fixture
    def fixture(scripts, small):
        def run(folder="run", **changes):
            model, run_folder = scripts[script].train(small(script, folder, **changes))
            return model, Path(run_folder), rows_of(run_folder)

        return run

    return fixture


ppo, dialog, sft, reward, rloo, grpo, dpo, tools = (small_fixture(script) for script in ALL)


@pytest.fixture(scope="session")
def talker(scripts, world, tmp_path_factory):
    """A model that knows five short dialogs by heart, whose utterances end with " <EOU>". -> model, data"""
    root = tmp_path_factory.mktemp("talker")
    rows = [dict(dialog=utterances, act=acts) for utterances, acts in BY_HEART]
    data = write_rows(root / "data", train=rows, test=rows)
    args = maker(scripts, world, root)(
        "sft",
        dataset_name=data,
        num_train_epochs=80.0,
        packing=False,
        per_device_train_batch_size=5,
        num_samples=0,
        save_every=0,
    )
    with handlers_kept():
        _, folder = scripts["sft"].train(args)
    model = shutil.move(folder / "model", root / "talker")
    return SimpleNamespace(model=str(model), data=data)


@pytest.fixture
def chat_with(monkeypatch):
    """chat_with(answer) starts a server whose answer to a question is answer(question): a text (one that ends
    with "..." is cut off), None, or an int, the status of an error. -> flags that name it as the judge; the
    requests, a list that fills"""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    servers = []

    def start(answer):
        requests = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.path == "/v1/chat/completions"
                assert self.headers["Authorization"] == "Bearer secret"
                [message] = body.pop("messages")
                assert message.pop("role") == "user"
                requests.append((message["content"], body))
                text = answer(message["content"])
                reason = "length" if str(text).endswith("...") else "stop"
                choice = dict(index=0, finish_reason=reason, message=dict(role="assistant", content=text))
                about = dict(id="1", object="chat.completion", created=0, model="m")
                reply = json.dumps(about | dict(choices=[choice]))
                self.send_response(text if isinstance(text, int) else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply.encode())

            def log_message(self, *rest):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        url = f"http://127.0.0.1:{server.server_port}/v1"
        return dict(judge_url=url, judge_model="m"), requests

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
