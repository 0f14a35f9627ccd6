"""vLLM samples the responses: `generate` of rloo_tldr.py, grpo_math.py and grpo_tools.py with another engine.

How to use it: docs/running.md#vllm-for-the-rollout. IT HAS NOT RUN WITH A REAL vLLM, only with a stub that
has its names (tests/runs/test_vllm_rollout.py). One process, one GPU, all weights trained (no LoRA).
"""

import os

# The engine lives in this process, so the weights are copied on the GPU. Read when vllm is imported.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from vllm import LLM, SamplingParams

engine = None  # started by the first call


@torch.no_grad()
def generate(policy, ids, mask, uniforms, stop_ids, temperature):
    """Sample k responses to each prompt. Inputs and outputs are those of `generate` in the scripts.

    Left-padded ids, mask [P, C]; uniforms [P, k, T]; stop_ids [any number]
    -> tokens and the log-probabilities they were sampled with (fp32), [P * k, T] each, 0 after the end; the k
    responses to a prompt are neighbors
    """
    P, k, T = uniforms.shape
    prompts = [{"prompt_token_ids": row[m].tolist()} for row, m in zip(ids, mask) for _ in range(k)]
    options = dict(
        temperature=temperature,  # no top-k and no top-p: those are vLLM's defaults
        max_tokens=T,
        logprobs=0,  # of the sampled token only
        stop_token_ids=[i for i in stop_ids.tolist() if i >= 0],
        ignore_eos=True,  # only stop_ids end a response
        detokenize=False,
    )
    # vLLM cannot take our random numbers. The first one of each response becomes its seed.
    seeds = (uniforms[:, :, 0].flatten() * 2**31).long().tolist()
    params = [SamplingParams(seed=seed, **options) for seed in seeds]
    with torch.autocast(ids.device.type, enabled=False):  # vLLM computes in its own dtype
        load_weights(policy)
        requests = engine.generate(prompts, params, use_tqdm=False)  # in the order of the prompts
    tokens = torch.zeros(P * k, T, dtype=torch.long)
    logprobs = torch.zeros(P * k, T)
    for row, request in enumerate(requests):
        response = request.outputs[0]
        for t, (token, choices) in enumerate(zip(response.token_ids, response.logprobs, strict=True)):
            tokens[row, t], logprobs[row, t] = token, choices[token].logprob
    return tokens.to(ids.device), logprobs.to(ids.device)


def load_weights(policy):
    """Give the policy's weights to the engine: before each rollout, so it never samples with older ones."""
    global engine
    if engine is None:
        engine = LLM(
            model=policy.name_or_path,  # its configuration; the weights come below
            dtype="bfloat16",
            gpu_memory_utilization=0.3,  # of the whole GPU; the update needs the rest
            logprobs_mode="processed_logprobs",  # after the division by the temperature
        )
    weights = policy.state_dict()
    engine.apply_model(lambda model: model.load_weights(weights.items()))
    engine.reset_prefix_cache()  # its keys and values are those of the old weights
