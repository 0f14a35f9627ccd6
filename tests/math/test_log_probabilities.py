"""Log-probabilities of policy and reference against transformers, which reads each text alone, unpadded."""

import copy

import peft
import pytest
import torch
import transformers
from conftest import ARCHITECTURES, HEADS, LAYERS, WIDTH, module_with
from math_tools import close, logprobs_alone, padded_batch, random_ids, response_part
from torch.nn.functional import pad

ppo = module_with("response_logprobs", "build_policy_and_value")
rloo = module_with("response_logprobs", "PolicyAndReference")
every_architecture = pytest.mark.parametrize("arch", ARCHITECTURES)
near = dict(rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def language_model(tiny_lm):
    """language_model(arch, pad="own") -> the folder's model, loaded by transformers, in evaluation mode."""
    loaded = {}

    def get(arch, pad="own"):
        folder = tiny_lm(arch, pad)
        if folder not in loaded:
            loaded[folder] = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        return loaded[folder]

    return get


# ---- Padding -----------------------------------------------------------------------------------------------


@every_architecture
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_padded_batch_scores_as_one_by_one(language_model, arch, temperature):
    """Tricks 2, 3, 6, 11: left-padded prompts and ended responses. No embedding has the pad id."""
    model = language_model(arch)
    ids, mask, rows, T = padded_batch()
    logprobs, entropies, hidden = ppo.response_logprobs(model, ids, mask, T, temperature)
    assert logprobs.shape == entropies.shape == hidden.shape[:2] == (len(rows), T)
    assert not logprobs[~mask[:, -T:]].any()
    assert not entropies[~mask[:, -T:]].any()
    for i, (prompt, response) in enumerate(rows):
        n = len(response)
        table = logprobs_alone(model, torch.cat([prompt, response]), temperature)
        close(logprobs[i, :n], response_part(table, prompt, response), **near)
        before = table[len(prompt) - 1 : -1]  # the distributions that the response was sampled from
        close(entropies[i, :n], -(before.exp() * before).sum(-1), **near)


@every_architecture
def test_more_padding_moves_no_score(language_model, arch):
    """Trick 10: in a batch that is five tokens wider, with another pad id, within 1e-5."""
    model = language_model(arch)
    ids, mask, _, T = padded_batch()
    narrow, _, _ = ppo.response_logprobs(model, ids, mask, T, 1.0)
    wide_ids, wide_mask = pad(ids, (5, 0), value=3), pad(mask, (5, 0), value=False)
    wide, _, _ = ppo.response_logprobs(model, wide_ids, wide_mask, T, 1.0)
    close(wide, narrow, **near)


def test_pad_equal_to_eos_changes_no_score(language_model):
    """Trick 1: with a real EOS in prompt and response, and EOS as the padding."""
    model = language_model("gpt2", "eos")
    eos = 0
    prompt, response = torch.tensor([7, eos, 9]), torch.tensor([8, eos])
    ids = torch.tensor([[eos, eos, 7, eos, 9, 8, eos, eos, eos]])
    mask = torch.tensor([[False] * 2 + [True] * 5 + [False] * 2])
    logprobs, _, _ = ppo.response_logprobs(model, ids, mask, 4, 1.0)
    table = logprobs_alone(model, torch.cat([prompt, response]))
    close(logprobs[0, :2], response_part(table, prompt, response), **near)


@every_architecture
def test_gradients_of_scores_are_transformers_own(language_model, arch):
    """Of the sum of all valid log-probabilities, in every weight."""
    ours, theirs = copy.deepcopy(language_model(arch)), copy.deepcopy(language_model(arch))
    ids, mask, rows, T = padded_batch()
    ppo.response_logprobs(ours, ids, mask, T, 1.0)[0].sum().backward()
    for prompt, response in rows:
        logits = theirs(input_ids=torch.cat([prompt, response])[None]).logits[0]
        response_part(logits.log_softmax(-1), prompt, response).sum().backward()
    for (name, x), y in zip(ours.named_parameters(), theirs.parameters()):
        if y.grad is None:
            assert x.grad is None or not x.grad.any(), name
        else:
            scale = max(1.0, y.grad.abs().max().item())
            close(x.grad / scale, y.grad / scale, rtol=0, atol=1e-4)


# ---- Dropout -----------------------------------------------------------------------------------------------


@every_architecture
def test_two_forwards_in_train_mode_are_equal(tiny_lm, arch):
    """Tricks 10 and 13: no dropout, and the same forward pass twice gives the same bits."""
    model = ppo.load_model(transformers.AutoModelForCausalLM, tiny_lm(arch)).train()
    ids, mask, _, T = padded_batch()
    first, _, _ = ppo.response_logprobs(model, ids, mask, T, 1.0)
    second, _, _ = ppo.response_logprobs(model, ids, mask, T, 1.0)
    assert torch.equal(first, second)


def test_train_mode_has_no_dropout(tiny_lm, tmp_path):
    """Trick 13: even if the saved config has dropout of every kind, and with LoRA."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_lm())
    dropout = dict(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5, summary_first_dropout=0.5)
    model.config.update(dropout)
    model.save_pretrained(tmp_path)
    loaded = ppo.load_model(transformers.AutoModelForCausalLM, str(tmp_path))
    loaded = ppo.add_lora(loaded, ppo.Args(lora_r=2)).train()
    ids = random_ids(2, 12)
    assert torch.equal(loaded(input_ids=ids).logits, loaded(input_ids=ids).logits)


# ---- Models that are refused -------------------------------------------------------------------------------

ODD_HEADS = {
    "Gemma2": dict(final_logit_softcapping=5.0),
    "Granite": dict(logits_scaling=4.0),
    "Cohere": dict(logit_scale=0.25),
}


@pytest.mark.parametrize("kind", ODD_HEADS)
def test_a_head_that_does_more_is_refused(kind):
    """Trick 43."""
    config = getattr(transformers, f"{kind}Config")(
        **ODD_HEADS[kind],
        vocab_size=64,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        initializer_range=1.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ppo.UserError, match="some_folder"):
        ppo.check_head(model, "some_folder")


@every_architecture
def test_the_architectures_pass_the_check_of_the_head(language_model, arch):
    ppo.check_head(language_model(arch), arch)


@pytest.mark.parametrize(
    "kind, sizes, context",
    [
        ("Roberta", dict(max_position_embeddings=66, pad_token_id=1), 64),
        ("DistilBert", dict(max_position_embeddings=66, n_layers=1, dim=32, n_heads=4), 66),
        ("GPT2", dict(n_positions=66), 66),
        ("Bloom", dict(), 10**9),  # ALiBi has no limit
    ],
)
def test_the_context_is_what_a_model_takes(kind, sizes, context):
    """One more token is an error in transformers."""
    if kind != "DistilBert":
        sizes = sizes | dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    config = getattr(transformers, f"{kind}Config")(vocab_size=99, **sizes)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    assert ppo.context_length(model) == context
    if context < 10**9:
        model(torch.full((1, context), 5))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, context + 1), 5))


# ---- References: LoRA and shared layers --------------------------------------------------------------------


def policy_and_value(folder, **flags):
    """Policy, reference and value function as PPO loads them."""
    args = ppo.Args(model_name_or_path=folder, dtype="float32", **flags)
    return ppo.build_policy_and_value(args, max_tokens=16)


def policy_and_reference(folder, **flags):
    """Policy and reference as RLOO loads them."""
    args = rloo.Args(model_name_or_path=folder, dtype="float32", **flags)
    return rloo.PolicyAndReference(*rloo.load_policy_and_reference(args, folder))


both_modules = pytest.mark.parametrize("build", [policy_and_value, policy_and_reference])


@torch.no_grad()
def disturb(module, part):
    """Move the trainable weights with `part` in their names, as training would."""
    torch.manual_seed(3)
    for name, p in module.named_parameters():
        if p.requires_grad and part in name:
            p += 0.2 * torch.randn_like(p)


def valid_logprobs(model):
    """Log-probabilities of the valid tokens of padded_batch: of the policy, and of the reference."""
    ids, mask, _, T = padded_batch()
    valid = mask[:, -T:]
    policy = model(ids, mask, T, 1.0)[0]
    reference = model.reference_logprobs(ids, mask, T, 1.0)
    return policy[valid], reference[valid]


def base_logprobs(lm):
    """The same of a plain language model, by transformers."""
    _, _, rows, _ = padded_batch()
    parts = [response_part(logprobs_alone(lm, torch.cat(row)), *row) for row in rows]
    return torch.cat(parts)


@both_modules
@pytest.mark.parametrize("arch, layers", [("gpt2", "c_attn"), ("llama", "q_proj,v_proj")])
def test_the_reference_under_lora_is_the_base_model(build, tiny_lm, language_model, arch, layers):
    """With the adapter switched off. It is on again for the policy."""
    model = build(tiny_lm(arch), lora_r=4, lora_target_modules=layers)
    base = base_logprobs(language_model(arch))
    policy, reference = valid_logprobs(model)
    close(policy, base, **near)  # B = 0 at the start
    close(reference, base, **near)
    disturb(model, "lora_")
    for _ in range(2):
        policy, reference = valid_logprobs(model)
        assert (policy - base).abs().max() > 0.1
        close(reference, base, **near)


@pytest.fixture
def adapter(tiny_lm, language_model, tmp_path):
    """(model, folder) of a LoRA adapter that has learned something, on the GPT-2."""
    config = peft.LoraConfig(r=2, target_modules=["c_attn"])
    model = peft.get_peft_model(copy.deepcopy(language_model("gpt2")), config)
    disturb(model, "lora_")
    model.peft_config["default"].base_model_name_or_path = tiny_lm("gpt2")
    model.save_pretrained(tmp_path)
    return model.eval(), str(tmp_path)


@both_modules
@pytest.mark.parametrize("rank", [0, 4])
def test_the_reference_of_an_adapter_is_the_adapter(build, adapter, rank):
    """Trick 14: training starts from a LoRA adapter, with and without a new one on top.

    The reference is the base with the first adapter, not the base alone.
    """
    adapter_model, folder = adapter
    start = base_logprobs(adapter_model)
    model = build(folder, lora_r=rank)
    policy, reference = valid_logprobs(model)
    close(policy, start, **near)
    close(reference, start, **near)
    disturb(model, "lora_" if rank else "policy")
    policy, reference = valid_logprobs(model)
    assert (policy - start).abs().max() > 0.1, "no weight of the policy is trainable"
    close(reference, start, **near)


def test_a_merged_adapter_is_trainable(adapter):
    """Without a new adapter all weights are trained, though peft had frozen them."""
    adapter_model, folder = adapter
    model = ppo.load_model(transformers.AutoModelForCausalLM, folder)
    ids = random_ids(1, 9)
    close(model(input_ids=ids).logits, adapter_model(input_ids=ids).logits, **near)
    assert len(ppo.trainable(model)) == len(list(model.parameters()))


@every_architecture
def test_shared_layers_stay_and_the_reference_with_them(tiny_lm, language_model, arch):
    """--num-shared-layers: the first layers are the same tensors in policy and reference, and frozen."""
    model = policy_and_value(tiny_lm(arch), num_shared_layers=1)
    in_policy = {p.data_ptr() for p in model.policy.parameters()}
    in_reference = {p.data_ptr() for p in model.reference.parameters()}
    assert in_policy & in_reference
    assert in_reference - in_policy
    assert not ppo.trainable(model.reference)
    base = base_logprobs(language_model(arch))
    close(valid_logprobs(model)[0], base, **near)
    disturb(model, "policy")
    policy, reference = valid_logprobs(model)
    assert (policy - base).abs().max() > 0.1
    close(reference, base, **near)
