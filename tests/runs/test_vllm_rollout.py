"""The diffs of docs/running.md that let vLLM sample, with a stub in place of vLLM. With vLLM itself, if it is
installed."""

import importlib.util
import inspect
import json
import math
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import accelerate
import pytest
import torch
from diff_blocks import apply_block, blocks
from run_tools import ROOT, eos_prone, rows_of
from transformers import AutoModelForCausalLM

import grpo_math as grpo
import grpo_tools
import rloo_tldr

pytest_plugins = ["run_fixtures"]
BLOCKS = blocks((ROOT / "docs/running.md").read_text())
SCRIPTS = (grpo, rloo_tldr, grpo_tools)


class SamplingParams(SimpleNamespace):
    """The fields that the example sets. An unknown name would be an error in vLLM too."""

    NAMES = {"temperature", "max_tokens", "logprobs", "stop_token_ids", "ignore_eos", "detokenize", "seed"}

    def __init__(self, **fields):
        assert fields.keys() == self.NAMES
        super().__init__(**fields)


class LLM:
    """Plain sampling, one response after the other, with the weights that were loaded last. As on a CPU: no
    seeds per response, and the start seeds torch's generator."""

    def __init__(self, model, dtype, gpu_memory_utilization, logprobs_mode):
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        for p in self.model.parameters():
            p.data.fill_(torch.nan)  # nothing works before the weights are loaded
        self.logprobs_mode, self.has_old_cache = logprobs_mode, True
        self.longest = 10_000  # max_model_len
        self.is_running = True
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace(shutdown=self.shutdown))
        torch.manual_seed(0)

    def shutdown(self):
        self.is_running = False

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights"
        self.has_old_cache = True
        self.model.load_state_dict({name: x.clone() for name, x in kwargs["weights_iterator"]})

    def reset_prefix_cache(self):
        self.has_old_cache = False

    def generate(self, prompts, params, use_tqdm):
        assert not self.has_old_cache and not torch.is_autocast_enabled("cpu")
        return [self.request(x["prompt_token_ids"], p) for x, p in zip(prompts, params, strict=True)]

    def request(self, prompt, params):
        assert params.seed is None
        tokens, logprobs = [], []
        for _ in range(min(params.max_tokens, self.longest - len(prompt))):
            logits = self.model(torch.tensor([prompt + tokens])).logits[0, -1]
            processed = (logits / params.temperature).log_softmax(-1)
            token = torch.multinomial(processed.exp(), 1).item()
            shown = processed if self.logprobs_mode == "processed_logprobs" else logits.log_softmax(-1)
            tokens.append(token)
            logprobs.append({token: SimpleNamespace(logprob=shown[token].item())})
            if token in params.stop_token_ids:
                break
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)])


@pytest.fixture
def vllm_rollout(monkeypatch):
    """examples/vllm_rollout.py, which imports the stub."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=SamplingParams))
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.delitem(sys.modules, "examples.vllm_rollout", raising=False)
    from examples import vllm_rollout

    yield vllm_rollout
    del sys.modules["examples.vllm_rollout"], sys.modules["examples"].vllm_rollout


def module_with_diff(script, without_checks=False):
    """A module of the script with the page's changes; without_checks: any gap is small enough."""
    module = types.ModuleType(script.__name__)
    module.__file__ = script.__file__
    source = apply_block(Path(script.__file__).read_text(), BLOCKS[f"vLLM in {script.__name__}.py"])
    if without_checks:
        assert source.count("assert gap < 0.1,") == 1
        source = source.replace("assert gap < 0.1,", "assert gap < 9,")
    sys.modules[module.__name__] = module  # dataclasses look it up
    try:
        exec(compile(source, "variant", "exec"), module.__dict__)
    finally:
        sys.modules[module.__name__] = script
    return module


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda x: x.__name__)
def test_a_run_with_the_diff(vllm_rollout, small, tiny_lm, tmp_path, monkeypatch, script):
    """The engine has the new weights in each update: its log-probabilities are those of a forward pass. It is
    ended before accelerate closes the process group that it would close too."""
    module = module_with_diff(script)
    flags = dict(total_episodes=24, num_mini_batches=1, num_ppo_epochs=1)
    if script is grpo_tools:
        flags |= dict(total_episodes=8)  # this model is slow without a cache
    else:  # responses of different lengths
        flags |= dict(model_name_or_path=eos_prone(tiny_lm, tmp_path / "lm"), temperature=0.8)
    engines, states = [], []
    start, end_training = LLM.__init__, accelerate.Accelerator.end_training

    def started(self, *rest, **options):
        start(self, *rest, **options)
        engines.append(self)

    def ended(self):
        states.extend(engine.is_running for engine in engines)
        end_training(self)

    monkeypatch.setattr(LLM, "__init__", started)
    monkeypatch.setattr(accelerate.Accelerator, "end_training", ended)
    _, folder = module.train(small(script.__name__, **flags))
    rows = rows_of(folder)
    assert len(rows) == flags["total_episodes"] // 4
    assert all(row["sampling/logprob_gap_max"] < 1e-4 for row in rows)
    assert any(row["completions/min_length"] < row["completions/max_length"] for row in rows)
    assert any(row["grad_norm"] > 0 for row in rows)
    assert states == [False]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda x: x.__name__)
def test_the_weights_of_importance_sampling(vllm_rollout, small, monkeypatch, script):
    """If the engine says that a token (RLOO: a response) was 1.5 or 3 times less likely than in the update,
    its gradient is 1.5 or, because of the limit, 2 times as large."""
    module = module_with_diff(script, without_checks=True)
    norms = {}
    for factor in (1.0, 1.5, 3.0):

        def sample(*inputs, factor=factor):
            tokens, logprobs = module.generate(*inputs)
            lower = math.log(factor) * (logprobs != 0)
            if script is rloo_tldr:
                lower[:, 1:] = 0
            return tokens, logprobs - lower

        monkeypatch.setattr(vllm_rollout, "generate", sample)
        flags = dict(num_mini_batches=1, num_ppo_epochs=1, kl_coef=0.0, total_episodes=4)
        _, folder = module.train(small(script.__name__, f"run{factor}", **flags))
        norms[factor] = rows_of(folder)[0]["grad_norm"]
    assert norms[1.0] > 0
    assert norms[1.5] == pytest.approx(1.5 * norms[1.0], rel=1e-3)
    assert norms[3.0] == pytest.approx(2.0 * norms[1.0], rel=1e-3)


def test_it_takes_and_returns_what_the_scripts_do(vllm_rollout, tiny_lm):
    """The same shapes, and 0 after the end. The random numbers decide what is sampled."""
    model = AutoModelForCausalLM.from_pretrained(tiny_lm()).eval()
    ids, mask = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[False, True, True], [True] * 3])
    uniforms = torch.rand(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    stop_ids = torch.arange(0, 200)  # often
    inputs = model, ids, mask, uniforms, stop_ids, 1.3
    ours, theirs = grpo.generate(*inputs), vllm_rollout.generate(*inputs)
    assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in theirs]
    tokens, logprobs = theirs
    after_end = ~grpo.length_mask(grpo.response_lengths(tokens, stop_ids), 5)
    assert after_end.any() and (tokens[after_end] == 0).all() and (logprobs[after_end] == 0).all()
    state = torch.get_rng_state()
    assert all(torch.equal(x, y) for x, y in zip(theirs, vllm_rollout.generate(*inputs)))
    other = vllm_rollout.generate(model, ids, mask, uniforms.flip(1), stop_ids, 1.3)
    assert not torch.equal(tokens, other[0])
    assert torch.equal(state, torch.get_rng_state())  # reward functions draw from it


def test_a_response_that_vllm_cuts_is_refused(vllm_rollout, tiny_lm):
    """Else the zeros after its end would count as sampled tokens."""
    model = AutoModelForCausalLM.from_pretrained(tiny_lm()).eval()
    inputs = model, torch.tensor([[5, 6]]), torch.ones(1, 2, dtype=torch.bool)
    uniforms, never = torch.rand(1, 2, 8, dtype=torch.float64), torch.tensor([-1])
    vllm_rollout.generate(*inputs, uniforms, never, 1.0)
    vllm_rollout.engine.longest = 9
    with pytest.raises(AssertionError, match="vLLM cut a response"):
        vllm_rollout.generate(*inputs, uniforms, never, 1.0)


def test_the_scripts_generate_behind_one_signature():
    for script in SCRIPTS:
        names = [*inspect.signature(script.generate).parameters]
        assert names == ["policy", "ids", "mask", "uniforms", "stop_ids", "temperature"]


# ---- With vLLM itself --------------------------------------------------------------------------------------


needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@needs_vllm
@pytest.mark.parametrize("model", ["arithmetic-sft", "tldr-sft"])  # a Llama, tied; a GPT-NeoX, not tied
def test_the_real_engine_samples_with_the_new_weights(model):
    """Its log-probabilities are those of a forward pass, and again after each part of the weights changed."""
    words = [sys.executable, ROOT / "tests/runs/real_vllm.py", ROOT / "checkpoints" / model]
    process = subprocess.run(words, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    results = json.loads(process.stdout.splitlines()[-1])
    assert results["gap"] < 1e-4
    assert results["same numbers, same tokens"] and not results["other numbers, same tokens"]
    assert results["the generator is as before"]
    assert min(results["lengths"]) < max(results["lengths"])
    for name, (gap_if_old, gap) in results["changed"].items():
        assert gap_if_old > 0.1 and gap < 1e-4, name


@needs_vllm
def test_a_real_run_ends_well(tmp_path):
    """grpo_math.py with the page's diff and the example: two updates, and exit code 0."""
    source = apply_block((ROOT / "grpo_math.py").read_text(), BLOCKS["vLLM in grpo_math.py"])
    (tmp_path / "grpo_math.py").write_text(source)
    for part in ("data", "checkpoints", "examples"):
        (tmp_path / part).symlink_to(ROOT / part)
    words = "grpo_math.py --total-episodes 512 --num-eval-prompts 4 --num-eval-samples 2 --output-dir run"
    process = subprocess.run([sys.executable, *words.split()], cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    rows = rows_of(tmp_path / "run")
    assert len(rows) == 2 and all(1e-5 < row["sampling/logprob_gap_mean"] < 0.03 for row in rows)
