"""The diff of docs/running.md that lets vLLM sample, with a stub in place of vLLM."""

import inspect
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from diff_blocks import apply_block, blocks
from run_tools import ROOT, eos_prone, rows_of
from transformers import AutoModelForCausalLM

import grpo_math as grpo
import grpo_tools
import rloo_tldr

pytest_plugins = ["run_fixtures"]
BLOCK = blocks((ROOT / "docs/running.md").read_text())["vLLM for the rollout"]


class SamplingParams(SimpleNamespace):
    """The fields that the example sets. An unknown name would be an error in vLLM too."""

    NAMES = {"temperature", "max_tokens", "logprobs", "stop_token_ids", "ignore_eos", "detokenize", "seed"}

    def __init__(self, **fields):
        assert fields.keys() == self.NAMES
        super().__init__(**fields)


class LLM:
    """Plain sampling, one response after the other, with the weights that were loaded last."""

    def __init__(self, model, dtype, gpu_memory_utilization, logprobs_mode):
        self.model = AutoModelForCausalLM.from_pretrained(model)
        for p in self.model.parameters():
            p.data.fill_(torch.nan)  # nothing works before the weights are loaded
        self.logprobs_mode, self.has_old_cache = logprobs_mode, True

    def apply_model(self, function):
        self.has_old_cache = True
        model = SimpleNamespace(load_weights=self.load_weights)
        return [function(model)]

    def load_weights(self, weights):
        self.model.load_state_dict({name: x.clone() for name, x in weights})

    def reset_prefix_cache(self):
        self.has_old_cache = False

    def generate(self, prompts, params, use_tqdm):
        assert not self.has_old_cache and not torch.is_autocast_enabled("cpu")
        return [self.request(x["prompt_token_ids"], p) for x, p in zip(prompts, params, strict=True)]

    def request(self, prompt, params):
        generator = torch.Generator().manual_seed(params.seed)
        tokens, logprobs = [], []
        for _ in range(params.max_tokens):
            logits = self.model(torch.tensor([prompt + tokens])).logits[0, -1]
            processed = (logits / params.temperature).log_softmax(-1)
            token = torch.multinomial(processed.exp(), 1, generator=generator).item()
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


def test_a_run_with_the_diff(vllm_rollout, small, tiny_lm, tmp_path):
    """The engine has the new weights in each update: its log-probabilities are those of a forward pass."""
    module = types.ModuleType("grpo_math")
    module.__file__ = grpo.__file__
    source = apply_block((ROOT / "grpo_math.py").read_text(), BLOCK)
    exec(compile(source, "variant", "exec"), module.__dict__)
    model = eos_prone(tiny_lm, tmp_path / "lm")  # responses of different lengths
    flags = dict(model_name_or_path=model, total_episodes=24, temperature=0.8)
    _, folder = module.train(small("grpo_math", num_mini_batches=1, num_ppo_epochs=1, **flags))
    rows = rows_of(folder)
    assert len(rows) == 6 and all(row["sampling/logprob_gap_max"] < 1e-4 for row in rows)
    assert any(row["completions/min_length"] < row["completions/max_length"] for row in rows)
    assert all(row["grad_norm"] > 0 for row in rows)


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
    assert all(torch.equal(x, y) for x, y in zip(theirs, vllm_rollout.generate(*inputs)))
    other = vllm_rollout.generate(model, ids, mask, uniforms.flip(1), stop_ids, 1.3)
    assert not torch.equal(tokens, other[0])


def test_the_scripts_generate_behind_one_signature():
    for script in (grpo, rloo_tldr, grpo_tools):
        names = [*inspect.signature(script.generate).parameters]
        assert names == ["policy", "ids", "mask", "uniforms", "stop_ids", "temperature"]
