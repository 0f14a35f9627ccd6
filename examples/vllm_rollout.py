"""vLLM samples the responses: `generate` of rloo_tldr.py, grpo_math.py and grpo_tools.py with another engine.

How to use it, and what was measured: docs/running.md#vllm-for-the-rollout. It was run with vLLM 0.32 on a
CPU, not yet on a GPU. One process, and all weights trained (no LoRA).
"""

import os

# The engine lives in this process, so the weights stay in its memory. Both are read when vllm is imported.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # else each copy of the weights prints some lines

import torch
from vllm import LLM, SamplingParams

DTYPE = "bfloat16"  # of vLLM's weights; in float32, its gap to an update in float32 is rounding only
engine = None  # started by the first call


@torch.no_grad()
def generate(policy, ids, mask, uniforms, stop_ids, temperature):
    """Sample k responses to each prompt. Inputs and outputs are those of `generate` in the scripts.

    Left-padded ids, mask [P, C]; uniforms [P, k, T]; stop_ids [any number]
    -> tokens and the log-probabilities they were sampled with (fp32), [P * k, T] each, 0 after the end; the k
    responses to a prompt are neighbors
    """
    P, k, T = uniforms.shape
    stops = [i for i in stop_ids.tolist() if i >= 0]
    prompts = [{"prompt_token_ids": row[m].tolist()} for row, m in zip(ids, mask) for _ in range(k)]
    options = dict(
        temperature=temperature,  # no top-k and no top-p: those are vLLM's defaults
        max_tokens=T,
        logprobs=0,  # of the sampled token only
        stop_token_ids=stops,
        ignore_eos=True,  # only stop_ids end a response
        detokenize=False,
    )
    # vLLM cannot take our random numbers. The first one of each response becomes its seed.
    seeds = (uniforms[:, :, 0].flatten() * 2**31).long().tolist()
    on_cpu = ids.device.type == "cpu"
    # On a CPU, vLLM 0.32 fails with a seed per response. There it draws from torch's global generator.
    params = [SamplingParams(seed=None if on_cpu else seed, **options) for seed in seeds]
    with torch.autocast(ids.device.type, enabled=False):  # vLLM computes in its own dtype
        load_weights(policy)
        with torch.random.fork_rng(enabled=on_cpu):  # reward functions may use this generator too
            if on_cpu:
                torch.manual_seed(seeds[0])
            requests = engine.generate(prompts, params, use_tqdm=False)  # in the order of the prompts
    tokens = torch.zeros(P * k, T, dtype=torch.long)
    logprobs = torch.zeros(P * k, T)
    for row, request in enumerate(requests):
        response = request.outputs[0]
        ended = response.token_ids[-1] in stops or len(response.token_ids) == T
        assert ended, "vLLM cut a response: the model's max_position_embeddings is too small"
        for t, (token, choices) in enumerate(zip(response.token_ids, response.logprobs, strict=True)):
            tokens[row, t], logprobs[row, t] = token, choices[token].logprob
    return tokens.to(ids.device), logprobs.to(ids.device)


def load_weights(policy):
    """Give the policy's weights to the engine: before each rollout, so it never samples with older ones."""
    global engine
    if engine is None:
        engine = LLM(
            model=policy.name_or_path,  # its configuration; the weights come below
            dtype=DTYPE,
            gpu_memory_utilization=0.3,  # of the GPU's memory, or the CPU's; the update needs the rest
            logprobs_mode="processed_logprobs",  # after the division by the temperature
        )
        # vLLM runs some models, such as GPT-NeoX, by the class of transformers, and changes that class. Its
        # other instances, such as our policy, have to be told that nothing changes for them.
        type(policy.base_model).do_not_compile = True
    # Not model.load_weights: layers on a CPU keep a copy of their weights in another layout.
    engine.collective_rpc("reload_weights", kwargs=dict(weights_iterator=policy.state_dict().items()))
    engine.reset_prefix_cache()  # its keys and values are those of the old weights


def stop():
    """End the engine, if it was started. Before accelerate ends, which closes torch's process group too."""
    global engine
    if engine is not None:
        engine.llm_engine.engine_core.shutdown()
        engine = None
