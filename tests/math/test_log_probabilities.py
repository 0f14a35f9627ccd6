"""Log-probabilities of policy and reference against transformers, which reads each text alone, unpadded;
and which models are refused because theirs differ."""

import copy
import json

import peft
import pytest
import torch
import transformers
from conftest import ARCHITECTURES, CONTEXT, HYBRIDS
from math_tools import close, logprobs_alone, normal, padded_batch, random_ids, random_model, response_part
from safetensors.torch import load_file

import ppo_dialog as dialog
import ppo_sentiment as ppo
import rloo_tldr as rloo
import sft

every_architecture = pytest.mark.parametrize("arch", [*ARCHITECTURES, *HYBRIDS])
each_check = pytest.mark.parametrize("check", [ppo.check_model, rloo.check_model, dialog.check_model])
in_transformers = "get_seq_length` can only be called on Attention layers"
near = dict(rtol=0, atol=1e-5)
LORA = dict(lora_r=4, lora_target_modules="all-linear")


# ---- Padding -----------------------------------------------------------------------------------------------


def expected_logprobs(lm, temperature=1.0):
    """Log-probabilities of the valid tokens of padded_batch, and entropies, one text after the other."""
    _, _, rows, _ = padded_batch()
    logprobs, entropies = [], []
    for prompt, response in rows:
        table = logprobs_alone(lm, torch.cat([prompt, response]), temperature)
        logprobs.append(response_part(table, prompt, response))
        before = table[len(prompt) - 1 : -1]  # the distributions that the response was sampled from
        entropies.append(-(before.exp() * before).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


@every_architecture
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_padded_batch_scores_as_one_by_one(language_model, arch, temperature):
    """Tricks 3, 6, 11: left-padded prompts and responses that ended; 0 after their ends."""
    model = language_model(arch)
    ids, mask, _, T = padded_batch()
    logprobs, entropies, hidden = ppo.response_logprobs(model, ids, mask, T, temperature)
    expected, expected_entropies = expected_logprobs(model, temperature)
    valid = mask[:, -T:]
    close(logprobs[valid], expected, **near)
    close(entropies[valid], expected_entropies, **near)
    assert not logprobs[~valid].any() and not entropies[~valid].any()
    assert logprobs.dtype is entropies.dtype is torch.float32
    assert hidden.shape[:2] == (4, T)


def test_pad_equal_to_eos_changes_no_score(language_model):
    """Trick 1: with a real EOS in prompt and response, and EOS as the padding."""
    model = language_model("gpt2", "eos")
    eos = model.config.eos_token_id
    prompt, response = torch.tensor([7, eos, 9]), torch.tensor([8, eos])
    ids = torch.tensor([[eos, eos, 7, eos, 9, 8, eos, eos, eos]])
    mask = torch.tensor([[False] * 2 + [True] * 5 + [False] * 2])
    logprobs, _, _ = ppo.response_logprobs(model, ids, mask, 4, 1.0)
    table = logprobs_alone(model, torch.cat([prompt, response]))
    close(logprobs[0], [*response_part(table, prompt, response), 0, 0], **near)


@pytest.mark.parametrize("critic", [None, "llama", "opt"])
def test_values_are_in_fp32_under_autocast(tiny_lm, critic):
    """The head reads the state before each token; a critic of its own sees the same padding.

    OPT projects its last states: they have the embeddings' width, which is not the config's hidden_size.
    """
    policy = ppo.load_model(transformers.AutoModelForCausalLM, tiny_lm())
    if critic is not None:
        critic = ppo.load_model(transformers.AutoModel, tiny_lm(critic))
    model = ppo.PolicyAndValue(policy, critic)
    assert not model.value_head.weight.any() and not model.value_head.bias.any()
    model.value_head.weight.data = 100 * normal(*model.value_head.weight.shape)
    ids, mask, _, T = padded_batch()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        *_, values = model(ids, mask, T, 1.0)
        hidden = ppo.response_logprobs(model.policy, ids, mask, T, 1.0)[2]
        if critic is not None:
            hidden = ppo.hidden_states(model.critic, ids, mask)[:, -T - 1 : -1]
    assert values.dtype is torch.float32 and not values[~mask[:, -T:]].any()
    expected = (hidden.double() @ model.value_head.weight.double().T).squeeze(-1)
    close(values, torch.where(mask[:, -T:], expected, 0.0), rtol=1e-5, atol=1e-3)


# ---- Loading -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def noisy(tiny_lm, tiny_classifier, tmp_path_factory):
    """noisy(arch) -> (class, folder) of a model whose config has dropout of every kind, and its own GELU."""

    def make(arch):
        is_lm = arch in ARCHITECTURES
        auto_class = transformers.AutoModelForCausalLM
        if not is_lm:
            auto_class = transformers.AutoModelForSequenceClassification
        model = auto_class.from_pretrained(tiny_lm(arch) if is_lm else tiny_classifier())
        for key, value in model.config.to_dict().items():
            if "drop" in key and isinstance(value, float):
                setattr(model.config, key, 0.5)
        folder = tmp_path_factory.mktemp(f"noisy-{arch}")
        model.save_pretrained(folder)
        return auto_class, folder

    return make


@pytest.mark.parametrize("arch", [*ARCHITECTURES, "distilbert"])
def test_train_mode_has_no_dropout(noisy, arch):
    """Tricks 10 and 13: two forward passes in train mode are equal to the bit; the config is not changed."""
    auto_class, folder = noisy(arch)
    model = ppo.load_model(auto_class, str(folder)).train()
    ids = random_ids(2, 12)
    first = model(input_ids=ids).logits
    assert torch.equal(model(input_ids=ids).logits, first)
    plain = auto_class.from_pretrained(folder).eval()
    close(first, plain(input_ids=ids).logits, rtol=0, atol=1e-4)
    before = json.loads((folder / "config.json").read_text())
    model.save_pretrained(folder / "saved")
    assert json.loads((folder / "saved/config.json").read_text()) == before
    if arch in ("gpt2", "gpt_neo", "distilbert"):
        assert 0.5 in before.values()  # there was dropout
    kinds = {type(module) for module in model.modules()}
    assert transformers.activations.NewGELUActivation not in kinds
    assert (torch.nn.GELU in kinds) == (arch in ("gpt2", "gpt_neo"))


def test_lora_has_no_dropout(tiny_lm):
    """Trap 13: two forward passes of an adapter in training mode are equal."""
    base = sft.load_model(transformers.AutoModelForCausalLM, tiny_lm())
    model = sft.add_lora(base, sft.Args(lora_r=4, lora_target_modules="c_attn")).train()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p)
    ids = torch.arange(3, 12)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


# ---- Models that are refused -------------------------------------------------------------------------------


def odd_model(kind, **settings):
    """A random language model, with logits of a few nats."""
    return random_model(kind, initializer_range=0.5, head_dim=16, **settings)


def forward_with(model, name, change):
    """The same model, whose transformer gets another value of an argument, if it gets one."""
    body = ppo.body_and_head(model)[0]
    forward = body.forward

    def forward_changed(*args, **kwargs):
        if kwargs.get(name) is not None:
            kwargs[name] = change(kwargs[name])
        return forward(*args, **kwargs)

    body.forward = forward_changed
    return model


def switch_dropout_on(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    return model


def noise_in_train_mode(model):
    """As a router of experts that jitters."""
    body = ppo.body_and_head(model)[0]
    body.norm.register_forward_hook(lambda m, _, out: out * (1 + torch.rand(1)) if m.training else out)
    return model


ODD = {
    "Gemma2": lambda lm: odd_model("gemma2", final_logit_softcapping=5.0),
    "Granite": lambda lm: odd_model("granite", logits_scaling=4.0),
    "Cohere": lambda lm: odd_model("cohere", logit_scale=0.25),
    "Gemma4": lambda lm: odd_model("gemma4_text", final_logit_softcapping=5.0),
    "RecurrentGemma": lambda lm: odd_model("recurrent_gemma", attention_window_size=4),
    "dropout": lambda lm: switch_dropout_on(lm("gpt2")),
    "noise": lambda lm: noise_in_train_mode(odd_model("llama")),
    "positions count pads": lambda lm: forward_with(lm("gpt2"), "position_ids", lambda _: None),
    "pads are read": lambda lm: forward_with(lm("llama"), "attention_mask", torch.ones_like),
}


@pytest.mark.parametrize("kind", ODD)
@each_check
def test_a_model_that_does_more_is_refused(tiny_lm, check, kind):
    """Trick 43: soft caps and scales of logits, states outside the cache, noise, shifted positions.

    (A model without a cache fails at the first batch: test_a_sampler_that_reads_less_ends_the_run.)
    """
    model = ODD[kind](lambda arch: ppo.load_model(transformers.AutoModelForCausalLM, tiny_lm(arch)))
    model.name_or_path = "some_folder"
    for seed in range(5):
        torch.manual_seed(seed)
        with pytest.raises(Exception, match=f"some_folder does not work here|{in_transformers}"):
            check(model, 16)


@every_architecture
@each_check
def test_the_architectures_pass_the_check(tiny_lm, check, arch):
    """Up to the largest number of tokens that they can read."""
    check(ppo.load_model(transformers.AutoModelForCausalLM, tiny_lm(arch)), CONTEXT)


# ---- References: LoRA and shared layers --------------------------------------------------------------------


def policy_and_reference(folder, **flags):
    args = ppo.Args(dtype="float32", **flags)
    device = torch.device("cpu")
    policy = ppo.load_policy(args, folder, device)
    return policy, ppo.load_reference(args, policy, folder, device)


@torch.no_grad()
def disturb(module):
    """Move the trainable weights, as training would."""
    torch.manual_seed(3)
    for p in ppo.trainable(module).values():
        p += 0.2 * torch.randn_like(p)


@torch.no_grad()
def both_logprobs(policy, reference):
    """Log-probabilities of the valid tokens of padded_batch: of the policy, and of the reference."""
    ids, mask, _, T = padded_batch()
    inputs, valid = (ids, mask, T, 1.0), mask[:, -T:]
    of_policy = ppo.response_logprobs(policy, *inputs)[0]
    return of_policy[valid], ppo.reference_logprobs(reference, policy, *inputs)[valid]


def assert_only_the_policy_moves(policy, reference, start):
    """Both have the log-probabilities `start`. Training moves the policy and not the reference."""
    for x in both_logprobs(policy, reference):
        close(x, start, **near)
    disturb(policy)
    for _ in range(2):  # the adapter is on again after each look at the reference
        moved, unmoved = both_logprobs(policy, reference)
        assert (moved - start).abs().max() > 0.1
        close(unmoved, start, **near)


@pytest.mark.parametrize("arch, layers", [("gpt2", "c_attn"), ("llama", "q_proj,v_proj")])
def test_the_reference_under_lora_is_the_base_model(tiny_lm, language_model, arch, layers):
    """With the adapter switched off. Only the adapter is trained."""
    policy, reference = policy_and_reference(tiny_lm(arch), lora_r=4, lora_target_modules=layers)
    assert reference is None and all("lora_" in name for name in ppo.trainable(policy))
    assert_only_the_policy_moves(policy, reference, expected_logprobs(language_model(arch))[0])


@pytest.mark.parametrize("lora_r", [0, 4])
def test_an_adapter_is_merged_into_its_base(tiny_lm, language_model, tmp_path, lora_r):
    """Trap 14: both the policy and its reference are the base with the adapter, with a new adapter too."""
    model = peft.get_peft_model(copy.deepcopy(language_model("gpt2")), peft.LoraConfig(r=2))
    disturb(model)
    model.peft_config["default"].base_model_name_or_path = tiny_lm("gpt2")
    model.save_pretrained(tmp_path / "adapter")
    model.save_pretrained(tmp_path / "8-bit/model")  # a run in 8 bit saves its adapter as the model
    expected, _ = expected_logprobs(model.eval())
    assert (expected - expected_logprobs(language_model("gpt2"))[0]).abs().max() > 0.01
    policy, _ = policy_and_reference(str(tmp_path / "8-bit"), lora_r=lora_r)
    close(both_logprobs(policy, policy)[0], expected, atol=1e-4, rtol=0)
    policy, reference = policy_and_reference(str(tmp_path / "adapter"), lora_r=lora_r)
    for logprobs in both_logprobs(policy, reference):
        close(logprobs, expected, atol=1e-4, rtol=0)
    assert len(ppo.trainable(policy)) == len([p for p in policy.parameters() if p.requires_grad]) > 0
    names = [name for name, _ in policy.named_parameters() if "lora_" in name]
    assert len(names) == (lora_r > 0) * len(ppo.trainable(policy))
    if lora_r:  # an adapter of an adapter names the right base
        disturb(policy)
        expected, _ = both_logprobs(policy, policy)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_lm())
        ppo.save_policy(policy, tokenizer, tmp_path / "run/model")
        again, _ = policy_and_reference(str(tmp_path / "run/adapter"), lora_r=0)
        close(both_logprobs(again, again)[0], expected, atol=1e-4, rtol=0)


def test_the_revision_of_the_base(monkeypatch, tiny_lm, language_model, tmp_path):
    """An adapter that was trained on an older version of its base is merged into that."""
    model = peft.get_peft_model(copy.deepcopy(language_model("gpt2")), peft.LoraConfig(r=2))
    model.peft_config["default"].base_model_name_or_path = tiny_lm("gpt2")
    model.peft_config["default"].revision = "v1"
    model.save_pretrained(tmp_path / "adapter")
    asked = []

    class Auto:
        @staticmethod
        def from_pretrained(path, revision="main", **kwargs):
            asked.append(revision)
            return transformers.AutoModelForCausalLM.from_pretrained(path, **kwargs)

    sft.load_model(Auto, str(tmp_path / "adapter"))
    assert asked == ["v1"]


@every_architecture
def test_shared_layers_stay_and_the_reference_with_them(tiny_lm, language_model, arch):
    """--num-shared-layers: the first layers are the same tensors in policy and reference, and frozen."""
    policy, reference = policy_and_reference(tiny_lm(arch), num_shared_layers=1)
    in_policy = {p.data_ptr() for p in policy.parameters()}
    in_reference = {p.data_ptr() for p in reference.parameters()}
    assert in_policy & in_reference
    assert in_reference - in_policy
    assert not ppo.trainable(reference)
    assert_only_the_policy_moves(policy, reference, expected_logprobs(language_model(arch))[0])


def in_bf16(model):
    """The names of the weights in bf16."""
    return {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}


@every_architecture
@pytest.mark.parametrize("flags", [LORA, dict(num_shared_layers=1)], ids=["LoRA", "shared layers"])
def test_frozen_weights_in_bf16_change_no_bit(language_model, tiny_lm, tmp_path, arch, flags):
    """Under autocast: log-probabilities, gradients, and what is saved, for a checkpoint in bf16."""
    folder = tmp_path / "checkpoint"
    copy.deepcopy(language_model(arch)).bfloat16().save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_lm())
    ids, mask, _, T = padded_batch()
    results = []
    for name in ("plain", "rounded"):
        torch.manual_seed(0)
        policy = ppo.load_policy(ppo.Args(dtype="float32", **flags), folder, torch.device("cpu"))
        disturb(policy)
        if name == "rounded":
            ppo.round_frozen_weights(policy, only_if_exact=True)
            assert in_bf16(policy) and not in_bf16(policy) & ppo.trainable(policy).keys()
            assert policy.get_output_embeddings().weight.dtype is torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            logprobs, entropies, _ = ppo.response_logprobs(policy, ids, mask, T, 1.0)
        (logprobs.sum() + entropies.sum()).backward()
        gradients = {key: p.grad for key, p in ppo.trainable(policy).items()}
        ppo.save_policy(policy, tokenizer, tmp_path / name)
        saved = load_file(tmp_path / name / "model.safetensors")
        results.append({"logprobs": logprobs} | gradients | saved)
    plain, rounded = results
    assert plain.keys() == rounded.keys()
    for key in plain:
        assert torch.equal(plain[key], rounded[key]) and rounded[key].dtype is torch.float32, key


@every_architecture
def test_what_is_rounded_to_bf16(tiny_lm, arch):
    """A reference is never saved, so all its layers are rounded. A policy keeps what bf16 would change."""
    cpu, references = torch.device("cpu"), []
    for dtype in ("float32", "bfloat16"):
        args = ppo.Args(dtype=dtype)
        references.append(ppo.load_reference(args, None, tiny_lm(arch), cpu))
    assert not in_bf16(references[0]) and in_bf16(references[1])
    with torch.autocast("cpu", torch.bfloat16):
        plain, rounded = [both_logprobs(reference, reference)[0] for reference in references]
    assert torch.equal(plain, rounded)
    policy = ppo.load_policy(ppo.Args(**LORA), tiny_lm(arch), cpu)
    ppo.round_frozen_weights(policy, only_if_exact=True)
    assert not in_bf16(policy)


@pytest.mark.parametrize("rank", [0, 4])
def test_plain_transformers_loads_what_is_saved(tiny_lm, noisy, tmp_path, rank):
    """The same log-probabilities and the same config; a LoRA adapter is merged, and saved beside it too."""
    _, folder = noisy("gpt2")
    policy, _ = policy_and_reference(str(folder), lora_r=rank)
    disturb(policy)
    expected = both_logprobs(policy, policy)[0]
    ppo.save_policy(policy, transformers.AutoTokenizer.from_pretrained(tiny_lm()), tmp_path / "model")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    close(expected_logprobs(saved)[0], expected, atol=1e-4, rtol=0)  # merging rounds
    configs = [json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "model")]
    assert configs[0] == configs[1]
    assert (tmp_path / "adapter/adapter_model.safetensors").exists() == bool(rank)
    assert (tmp_path / "adapter/tokenizer_config.json").exists() == bool(rank)  # so that scripts load it
