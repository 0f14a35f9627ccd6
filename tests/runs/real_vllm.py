"""The example with the real vLLM, for test_vllm_rollout.py. vLLM changes its process, so this is a program.

python tests/runs/real_vllm.py MODEL        # prints a line of JSON
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import grpo_math as grpo  # noqa: E402
from examples import vllm_rollout  # noqa: E402

vllm_rollout.DTYPE = "float32"
policy = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
ids, mask = torch.tensor([[0, 5, 6], [7, 8, 9]]), torch.tensor([[False, True, True], [True] * 3])
uniforms = torch.rand(2, 4, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
stop_ids = torch.arange(0, 60)


@torch.no_grad()
def largest_gap(tokens, logprobs):
    """The largest distance to the log-probabilities of the update."""
    valid = grpo.length_mask(grpo.response_lengths(tokens, stop_ids), 20)
    all_ids = torch.cat([ids.repeat_interleave(4, 0), tokens], 1)
    all_mask = torch.cat([mask.repeat_interleave(4, 0), valid], 1)
    expected, _ = grpo.response_logprobs(policy, all_ids, all_mask, 20, 1.3)
    return (expected - logprobs).abs().max().item()


def sample(numbers):
    return vllm_rollout.generate(policy, ids, mask, numbers, stop_ids, 1.3)


torch.manual_seed(5)
first = sample(uniforms)  # starts the engine, which seeds torch's generator
state = torch.get_rng_state()
again = sample(uniforms)
results = {
    "gap": largest_gap(*first),
    "same numbers, same tokens": all(torch.equal(x, y) for x, y in zip(first, again)),
    "other numbers, same tokens": torch.equal(first[0], sample(uniforms.flip(0, 1))[0]),
    "the generator is as before": torch.equal(state, torch.get_rng_state()),
    "lengths": grpo.response_lengths(first[0], stop_ids).tolist(),
    "changed": {},
}
torch.manual_seed(6)
for name in ("embed", "attention|attn", "mlp", "norm", "head|embed"):
    for key, p in policy.named_parameters():
        if any(part in key for part in name.split("|")):
            p.data *= 1 + 0.3 * torch.randn_like(p)
    gap_if_old = largest_gap(*again)
    again = sample(uniforms)
    results["changed"][name] = [gap_if_old, largest_gap(*again)]
vllm_rollout.stop()
print(json.dumps(results))
