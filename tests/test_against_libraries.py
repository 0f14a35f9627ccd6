"""The scripts against transformers and peft: what these compute for one text alone, without padding, packing, cache or chunks."""

import copy
from functools import partial

import naive
import pytest
import torch
import transformers
from conftest import ARCHITECTURES, HEADS, LAYERS, ROOT, SCRIPTS, WIDTH, shipping
from datasets import Dataset
from torch.nn.functional import pad

every_architecture = pytest.mark.parametrize("arch", ARCHITECTURES)
rollouts = shipping("token_logprobs", "sample_tokens")
TOO_LARGE = 5000  # an id that no embedding here has


@pytest.fixture(scope="module")
def language_model(tiny_lm):
    """language_model(arch, pad="own") -> the folder's model as transformers loads it, in evaluation mode."""
    made = {}

    def get(arch, pad="own"):
        if (arch, pad) not in made:
            made[arch, pad] = transformers.AutoModelForCausalLM.from_pretrained(tiny_lm(arch, pad)).eval()
        return made[arch, pad]

    return get


def numbers(*shape, high=1024, seed=0):
    return torch.randint(2, high, shape, generator=torch.Generator().manual_seed(seed))


def padded_batch(C=9, T=7):
    """Prompts of 1 to C tokens and responses of 1 to T, with an id that does not exist wherever nothing stands. -> ids, mask, rows, T"""
    prompts, responses = (C, 1, 4, 6), (T, 5, 1, 3)
    rows = [(numbers(p, seed=p), numbers(r, seed=10 + r)) for p, r in zip(prompts, responses)]
    ids = [torch.cat([pad(p, (C - len(p), 0), value=TOO_LARGE), pad(r, (0, T - len(r)), value=TOO_LARGE)]) for p, r in rows]
    return torch.stack(ids), torch.stack(ids) != TOO_LARGE, rows, T


@torch.no_grad()
def alone(model, row, temperature=1.0):
    """Log-probabilities of all tokens behind each token of one text, by transformers itself. [L] -> [L, V]"""
    return (model(input_ids=row[None]).logits[0].double() / temperature).log_softmax(-1)


def tokens_behind(table, prompt, response):
    """From a table of `alone`: the log-probability of each token of the response."""
    at = torch.arange(len(prompt) - 1, len(prompt) + len(response) - 1)
    return table[at, response]


def close(ours, theirs, atol=1e-5):
    torch.testing.assert_close(ours.detach().double(), theirs.detach().double(), rtol=0, atol=atol)


# ---- scoring ---------------------------------------------------------------------------------------------------------
@rollouts
@every_architecture
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_padded_batch_scores_as_one_by_one(k, language_model, arch, temperature, monkeypatch):
    """Tricks 2, 3, 6, 11: left-padded prompts and ended responses, whose pads have no row in the embedding."""
    monkeypatch.setattr(k, "packing_pays", lambda *_: False)
    model = language_model(arch)
    ids, mask, rows, T = padded_batch()
    logprobs, entropies, hidden = k.response_logprobs(model, ids, mask, T, temperature)
    assert logprobs.shape == entropies.shape == hidden.shape[:2] == (len(rows), T)
    for ours, entropy, (prompt, response) in zip(logprobs, entropies, rows):
        table = alone(model, torch.cat([prompt, response]), temperature)
        close(ours[: len(response)], tokens_behind(table, prompt, response))
        before = table[len(prompt) - 1 : -1]
        close(entropy[: len(response)], -(before.exp() * before).sum(-1))


@rollouts
def test_an_update_keeps_probabilities_and_a_rollout_none(k, language_model, monkeypatch):
    model, (ids, mask, _, T) = language_model("gpt2"), padded_batch()
    kernel, asked = k.token_logprobs, []
    monkeypatch.setattr(k, "token_logprobs", lambda *args: (asked.append(args[5]), kernel(*args))[1])
    k.response_logprobs(model, ids, mask, T, 1.0)
    with torch.no_grad():
        k.response_logprobs(model, ids, mask, T, 1.0)
    assert asked == [k.KEPT_PROBS, 0]


@rollouts
@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch != "bloom"])
def test_packed_rows_are_the_padded_ones(k, language_model, arch, monkeypatch):
    """Log-probabilities, entropies, hidden states and gradients of rows that are one row, against those of rows moved left."""
    model, (ids, mask, _, T) = language_model(arch), padded_batch()
    valid, found = mask[:, -T:], []
    for way in (False, True):
        monkeypatch.setattr(k, "packing_pays", lambda *_: way)  # noqa: B023
        model.zero_grad()
        logprobs, entropies, hidden = k.response_logprobs(model, ids, mask, T, 0.7)
        (logprobs * torch.linspace(-1, 2, logprobs.numel()).view(logprobs.shape)).sum().backward()
        gradients = (torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters())
        found.append((logprobs, entropies, hidden[valid], *gradients))
    model.zero_grad()
    for ours, theirs in zip(*found):
        close(ours, theirs, atol=1e-4)


@rollouts
def test_when_rows_are_packed(k):
    """Short rows of uneven lengths in a wide model; not long ones, not even ones, and never where packing would be wrong."""
    config = dict(vocab_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    body = transformers.LlamaModel(transformers.LlamaConfig(hidden_size=768, **config))

    def pays(body, *lengths):
        return k.packing_pays(body, k.length_mask(torch.tensor(lengths), max(lengths)), max(lengths))

    assert pays(body, 20, 15, 12, 8) and pays(body, *range(4, 22)) and not pays(body, 20, 20, 20, 20)
    narrow = transformers.LlamaModel(transformers.LlamaConfig(hidden_size=32, **config))
    assert not pays(body, *range(100, 110)) and not pays(narrow, *range(4, 22)) and pays(narrow, 60, 3, 2, 2)
    for window, can in ((59, False), (60, True)):
        windowed = transformers.MistralConfig(hidden_size=32, num_key_value_heads=2, sliding_window=window, **config)
        assert pays(transformers.MistralModel(windowed), 60, 3, 2, 2) is can
    assert not pays(transformers.BloomModel(transformers.BloomConfig(vocab_size=8, hidden_size=32, n_layer=1, n_head=2)), 60, 3, 2, 2)
    falcon = transformers.FalconConfig(vocab_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    for falcon.alibi in (False, True):
        assert pays(transformers.FalconModel(falcon), 60, 3, 2, 2) is not falcon.alibi
    recurrent = transformers.MambaConfig(vocab_size=8, hidden_size=32, num_hidden_layers=1)
    assert not pays(transformers.MambaModel(recurrent), 60, 3, 2, 2)


@every_architecture
def test_prompts_read_once_give_the_same_states(scripts, language_model, arch):
    """group_states against response_states: 3 responses to each of 2 prompts of 9 and 2 tokens, hidden states and gradients."""
    k, model, T = scripts["rloo_tldr"], language_model(arch), 6
    prompts, lengths = [numbers(9, seed=1), numbers(2, seed=2)], (5, 1, 3, 2, 4, 5)
    rows = [torch.cat([pad(prompts[i % 2], (9 - len(prompts[i % 2]), 0), value=TOO_LARGE), numbers(T, seed=3 + i)]) for i in range(6)]
    mask = torch.stack([torch.cat([torch.arange(9) >= 9 - len(prompts[i % 2]), torch.arange(T) < n]) for i, n in enumerate(lengths)])
    ids, found = torch.where(mask, torch.stack(rows), TOO_LARGE), []
    for states in (k.response_states, partial(k.group_states, 3)):
        logprobs, entropies, hidden = k.response_logprobs(model, ids, mask, T, 0.7, states)
        model.zero_grad()
        (logprobs * torch.linspace(-1, 2, logprobs.numel()).view(logprobs.shape)).sum().backward()
        gradients = (torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters())
        found.append((logprobs, entropies, hidden[mask[:, -T:]], *gradients))
    model.zero_grad()
    for ours, theirs in zip(*found):
        close(ours, theirs, atol=1e-4)


@rollouts
@every_architecture
def test_more_padding_moves_no_score(k, language_model, arch):
    """Trick 10: at another width within 1e-5."""
    ids, mask, rows, T = padded_batch()
    short, _, _ = k.response_logprobs(language_model(arch), ids, mask, T, 1.0)
    wide, _, _ = k.response_logprobs(language_model(arch), pad(ids, (5, 0), value=3), pad(mask, (5, 0), value=False), T, 1.0)
    valid = mask[:, -T:]
    close(wide[valid], short[valid])


@rollouts
def test_pad_equal_to_eos_changes_no_score(k, language_model):
    """Trick 1: with a real EOS in prompt and response, and EOS as the padding."""
    model = language_model("gpt2", "eos")
    prompt, response, eos = torch.tensor([7, 0, 9]), torch.tensor([8, 0]), 0
    ids = torch.tensor([[eos, eos, 7, 0, 9, 8, 0, eos, eos]])
    mask = torch.tensor([[False] * 2 + [True] * 5 + [False] * 2])
    ours = k.response_logprobs(model, ids, mask, 4, 1.0)[0][0, :2]
    close(ours, tokens_behind(alone(model, torch.cat([prompt, response])), prompt, response))


@rollouts
@every_architecture
def test_gradients_of_scores_are_transformers_own(k, language_model, arch):
    """Of the sum of valid log-probabilities, in every weight."""
    ours, theirs = (copy.deepcopy(language_model(arch)) for _ in range(2))
    ids, mask, rows, T = padded_batch()
    torch.where(mask[:, -T:], k.response_logprobs(ours, ids, mask, T, 1.0)[0], 0.0).sum().backward()
    for prompt, response in rows:
        logp = theirs(input_ids=torch.cat([prompt, response])[None]).logits[0].log_softmax(-1)
        tokens_behind(logp, prompt, response).sum().backward()
    for (name, x), (_, y) in zip(ours.named_parameters(), theirs.named_parameters()):
        assert y.grad is not None or x.grad is None or x.grad.abs().max() == 0, name
        if y.grad is not None:
            scale = max(1.0, y.grad.abs().max().item())
            close(x.grad / scale, y.grad / scale, atol=1e-4)


@rollouts
@every_architecture
def test_two_forwards_in_train_mode_are_equal(k, tiny_lm, arch):
    """Trick 13, and trick 10: the same forward twice gives the same bits."""
    model = k.load_model(transformers.AutoModelForCausalLM, tiny_lm(arch)).train()
    ids, mask, _, T = padded_batch()
    first, second = (k.response_logprobs(model, ids, mask, T, 1.0)[0] for _ in range(2))
    assert torch.equal(first, second)


def odd_heads():
    sizes = dict(hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, vocab_size=64, intermediate_size=64, head_dim=8,
                 num_key_value_heads=2, initializer_range=1.0, bos_token_id=0, eos_token_id=0, pad_token_id=0)  # fmt: skip
    return {
        "gemma2": transformers.Gemma2Config(**sizes, final_logit_softcapping=5.0),
        "granite": transformers.GraniteConfig(**sizes, logits_scaling=4.0),
        "cohere": transformers.CohereConfig(**sizes, logit_scale=0.25),
    }


@rollouts
@pytest.mark.parametrize("arch", ["gemma2", "granite", "cohere"])
def test_a_head_that_does_more_is_refused(k, arch):
    """Trick 43."""
    model = transformers.AutoModelForCausalLM.from_config(odd_heads()[arch]).eval()
    with pytest.raises(k.UserError, match="some_folder"):
        k.check_head(model, "some_folder")


@rollouts
@every_architecture
def test_the_architectures_pass_the_check_of_the_head(k, language_model, arch):
    k.check_head(language_model(arch), arch)


# ---- generating ------------------------------------------------------------------------------------------------------
def prompts_to_continue(T=8):
    C, lengths = 6, (6, 2, 4, 1, 5)
    rows = [numbers(n, seed=20 + n) for n in lengths]
    ids = torch.stack([pad(row, (C - len(row), 0), value=TOO_LARGE) for row in rows])
    uniforms = torch.rand(len(rows), T, generator=torch.Generator().manual_seed(4))
    return rows, ids, ids != TOO_LARGE, torch.tensor([8, 5, 8, 3, 1]), uniforms


def is_the_inverse(token, logprobs, uniform):
    """Whether a token is the inverse of the cumulative sum at the uniform, give or take 1e-5."""
    shifted = (min(max(uniform + shift, 0.0), 1 - 1e-9) for shift in (-1e-5, 0.0, 1e-5))
    return token in {naive.sample_token(logprobs.tolist(), u) for u in shifted}


def write(k, model, ids, mask, room, uniforms, stop, temperature):
    """Tokens and lengths as the script generates them. Only ppo_sentiment.py draws a room: elsewhere lengths are cut to it afterwards."""
    if hasattr(k, "generate"):
        return k.generate(model, ids, mask, room, uniforms, stop, temperature)
    if hasattr(k, "generate_groups"):
        tokens, lengths, _ = k.generate_groups(model, ids, mask, uniforms, stop, temperature)
        return tokens, torch.minimum(lengths, room)
    stops = torch.tensor([[0], [1]]).repeat(1, model.get_output_embeddings().weight.shape[0])
    if stop >= 0:
        stops[:, stop] = 1
    tokens, lengths, _ = k.generate_until(model, ids, mask, uniforms, stops, temperature)
    return tokens, torch.minimum(lengths, room)


@rollouts
@every_architecture
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_generate_samples_from_transformers_softmax(k, language_model, arch, temperature):
    """Each token drawn is the inverse cumulative sum, at its uniform, of what transformers says of this text alone without a cache.

    Rows end by their room or by a stop token, each at another step, and leave the batch.
    """
    model = language_model(arch)
    rows, ids, mask, room, uniforms = prompts_to_continue()
    free, lengths = write(k, model, ids, mask, room, uniforms, -1, temperature)
    assert lengths.tolist() == room.tolist()
    stop = free[2, 3].item()
    tokens, lengths = write(k, model, ids, mask, room, uniforms, stop, temperature)
    assert tokens.shape == uniforms.shape and lengths[2] <= 4
    wanted = [min(a, b) for a, b in zip(naive.response_lengths(free.tolist(), stop), room.tolist())]
    assert lengths.tolist() == wanted
    for row, drawn, n, us in zip(rows, tokens, lengths.tolist(), uniforms):
        table = alone(model, torch.cat([row, drawn[:n]]), temperature)[len(row) - 1 :]
        for t in range(n):
            assert is_the_inverse(drawn[t].item(), table[t], us[t].item())


class Forced(transformers.LogitsProcessor):
    """Keeps the logits of every step, and makes generate take the given tokens."""

    def __init__(self, tokens):
        self.tokens, self.seen = tokens, []

    def __call__(self, input_ids, scores):
        self.seen.append(scores.clone())
        forced = torch.full_like(scores, -torch.inf)
        return forced.scatter(1, self.tokens[:, len(self.seen) - 1 : len(self.seen)], 0.0)


@rollouts
@every_architecture
def test_generate_agrees_with_transformers_generate(k, language_model, arch):
    """transformers' own generate, led along the same tokens, has the probabilities that they were drawn from."""
    model = language_model(arch)
    rows, ids, mask, _, uniforms = prompts_to_continue()
    tokens, lengths = write(k, model, ids, mask, torch.full((len(rows),), 8), uniforms, -1, 1.0)
    forced = Forced(tokens)
    config = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=1, eos_token_id=TOO_LARGE)
    inputs = torch.where(mask, ids, 1)
    out = model.generate(inputs, attention_mask=mask.long(), generation_config=config, logits_processor=[forced])
    assert lengths.tolist() == [8] * len(rows) and torch.equal(out[:, -8:], tokens)
    for t, scores in enumerate(forced.seen):
        for logits, token, u in zip(scores, tokens[:, t].tolist(), uniforms[:, t].tolist()):
            assert is_the_inverse(token, logits.double(), u)


@rollouts
def test_generate_of_a_bf16_model_sums_in_fp32(k, language_model):
    """Each token's interval of the float64 cumulative sum holds its uniform, give or take 1e-5; probabilities in bf16 are 4e-3 off."""
    model, n = copy.deepcopy(language_model("gpt2")).bfloat16(), 4096
    ids, room, uniforms = torch.zeros(n, 1, dtype=torch.long), torch.ones(n, dtype=torch.long), (torch.arange(n)[:, None] + 0.5) / n
    tokens, _ = write(k, model, ids, ids == 0, room, uniforms, -1, 1.0)
    with torch.no_grad():
        ends = model(ids[:1]).logits[0, -1].double().softmax(-1).cumsum(-1)
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    assert ((begins[tokens] - 1e-5 < uniforms) & (uniforms < ends[tokens] + 1e-5)).all()


@rollouts
def test_generate_does_not_depend_on_the_batch(k, language_model):
    """A row alone, without its padding, gets the same tokens."""
    model = language_model("gpt2")
    rows, ids, mask, room, uniforms = prompts_to_continue()
    tokens, lengths = write(k, model, ids, mask, room, uniforms, 5, 1.0)
    for i, row in enumerate(rows):
        single, n = write(k, model, row[None], torch.ones(1, len(row), dtype=torch.bool), room[i : i + 1], uniforms[i : i + 1], 5, 1.0)
        assert n[0] == lengths[i] and torch.equal(single[0, : n[0]], tokens[i, : n[0]])


@rollouts
@pytest.mark.parametrize("length, dtype", [(1, torch.bfloat16), (2, torch.float32), (128, torch.float32), (129, torch.float32)])
def test_attention_in_bf16_is_in_fp32_over_rows(k, length, dtype):
    """Under autocast on a CPU: rows in fp32, to the bit; a token of generation in bf16."""
    parts = [torch.randn(2, 3, length, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]  # no bf16 holds these
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = k.attention(torch.nn.Module(), *parts, None)
    parts = (x.to(dtype) for x in parts)
    expected = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=length > 1)
    assert found.dtype is dtype and torch.equal(found, expected.transpose(1, 2))


@rollouts
@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch not in ("bloom", "gpt_neo")])  # these have code of their own
def test_models_attend_over_rows_in_fp32(k, language_model, arch, monkeypatch):
    """What transformers' models call in a pass over a batch, and in one for a token behind a cache."""
    model, seen, product = language_model(arch), [], torch.nn.functional.scaled_dot_product_attention

    def watched(query, *rest, **options):
        seen.append((query.shape[2], query.dtype, torch.is_autocast_enabled("cpu")))
        return product(query, *rest, **options)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "sdpa", k.attention)  # it is the last script's that was imported
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cache = model(numbers(2, 5)).past_key_values
        model(numbers(2, 1), past_key_values=cache)
    assert seen[0] == (5, torch.float32, False) and seen[-1][0] == 1 and seen[-1][2]


# ---- LoRA and shared layers ------------------------------------------------------------------------------------------
LAYERS_WITH_LORA = {"gpt2": "c_attn", "llama": "q_proj,v_proj"}


@torch.no_grad()
def disturb(module, names="lora_"):
    """Moves the trainable weights whose name holds `names`, as training would."""
    torch.manual_seed(3)
    for name, p in module.named_parameters():
        if p.requires_grad and names in name:
            p += 0.2 * torch.randn_like(p)


def policy_of(k, folder, **flags):
    """Policy and reference in the script's own module, with or without a value function."""
    args = k.Args(model_name_or_path=str(folder), dtype="float32", **flags)
    return k.build_policy(args) if hasattr(k, "build_policy") else k.PolicyAndReference(*k.load_policy(args, args.model_name_or_path))


@rollouts
@pytest.mark.parametrize("arch", LAYERS_WITH_LORA)
def test_the_adapter_turned_off_is_the_base(k, tiny_lm, language_model, arch):
    model = policy_of(k, tiny_lm(arch), lora_r=4, lora_target_modules=LAYERS_WITH_LORA[arch])
    ids, mask, rows, T = padded_batch()
    valid = mask[:, -T:]
    base = k.response_logprobs(language_model(arch), ids, mask, T, 1.0)[0]
    close(model(ids, mask, T, 1.0)[0][valid], base[valid])  # B = 0 at the start
    disturb(model)
    assert (model(ids, mask, T, 1.0)[0] - base)[valid].abs().max() > 0.1
    close(model.reference_logprobs(ids, mask, T, 1.0)[valid], base[valid])
    assert (model(ids, mask, T, 1.0)[0] - base)[valid].abs().max() > 0.1  # and it is on again


@pytest.fixture
def adapter(tiny_lm, language_model, tmp_path):
    """(model, folder) of a LoRA that has learned something, on the GPT-2."""
    import peft

    model = peft.get_peft_model(copy.deepcopy(language_model("gpt2")), peft.LoraConfig(r=2, target_modules=["c_attn"]))
    disturb(model)
    model.peft_config["default"].base_model_name_or_path = tiny_lm("gpt2")
    model.save_pretrained(tmp_path)
    return model.eval(), str(tmp_path)


@rollouts
@pytest.mark.parametrize("rank", [0, 4])
def test_the_reference_of_an_adapter_is_the_adapter(k, adapter, rank):
    """Trick 14: the start is a LoRA of its own, and the reference is not the base below it. Without and with a new LoRA."""
    ids, mask, rows, T = padded_batch()
    valid = mask[:, -T:]
    theirs = torch.cat([tokens_behind(alone(adapter[0], torch.cat(row)), *row) for row in rows])
    model = policy_of(k, adapter[1], lora_r=rank)
    close(model(ids, mask, T, 1.0)[0][valid], theirs)
    disturb(model, "lora_" if rank else "policy")
    close(model.reference_logprobs(ids, mask, T, 1.0)[valid], theirs)
    assert (model(ids, mask, T, 1.0)[0][valid] - theirs).abs().max() > 0.1, "nothing of the policy is trainable"


@pytest.mark.parametrize("name", ["sft", "reward_model", "ppo_sentiment"])
def test_a_merged_adapter_is_trainable(scripts, name, adapter):
    """Without a new LoRA, training goes on with all weights, though peft froze them."""
    k = scripts[name]
    model = k.load_model(transformers.AutoModelForCausalLM, adapter[1])
    ids = numbers(1, 9)
    close(model(input_ids=ids).logits, adapter[0](input_ids=ids).logits)
    assert len(k.trainable(model)) == len(list(model.parameters()))


@rollouts
@every_architecture
def test_shared_layers_stay_and_the_reference_with_them(k, tiny_lm, language_model, arch):
    model = policy_of(k, tiny_lm(arch), num_shared_layers=1)
    mine, theirs = ({p.data_ptr() for p in part.parameters()} for part in (model.policy, model.reference))
    assert mine & theirs and theirs - mine
    assert not [name for name, p in model.reference.named_parameters() if p.requires_grad]
    ids, mask, _, T = padded_batch()
    valid = mask[:, -T:]
    base = k.response_logprobs(language_model(arch), ids, mask, T, 1.0)[0][valid]
    close(model(ids, mask, T, 1.0)[0][valid], base)
    disturb(model, "policy")
    close(model.reference_logprobs(ids, mask, T, 1.0)[valid], base)
    assert (model(ids, mask, T, 1.0)[0][valid] - base).abs().max() > 0.1


# ---- classifiers -----------------------------------------------------------------------------------------------------
TEXTS = ["I loved it.", "What a mess, from the first minute to the last.", "Fine", "A film about a cook and a thief <|endoftext|>"]


@pytest.fixture(scope="module")
def classifier_folder(tiny_lm, tiny_classifier, tmp_path_factory):
    """classifier_folder(arch, pad, labels) -> folder of a random classifier on this body, with its tokenizer."""

    def make(arch, pad="own", labels=("negative", "positive")):
        folder = tiny_classifier("own") if arch == "distilbert" else tiny_lm(arch, pad)
        torch.manual_seed(5)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2, id2label=dict(enumerate(labels)))
        out = tmp_path_factory.mktemp("classifier")
        model.save_pretrained(out)
        transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(out)
        return str(out)

    return make


@torch.no_grad()
def logits_alone(folder, rows):
    """transformers' own logits of each text alone, where there is nothing to pad."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model.config.pad_token_id = -1
    return torch.stack([model(input_ids=torch.tensor([row])).logits[0] for row in rows])


@every_architecture
@pytest.mark.parametrize("pad", ["own", "eos"])
def test_sequence_logits_do_not_depend_on_padding(scripts, classifier_folder, arch, pad):
    """Trick 9: the last real token, also where it is EOS and pad is EOS; any padding, any batch."""
    k, folder = scripts["reward_model"], classifier_folder(arch, pad)
    rows = [[5, 6, 7, 8, 9], [11], [12, 13, 0], [0, 0]]
    theirs = logits_alone(folder, rows)
    model = k.load_model(transformers.AutoModelForSequenceClassification, folder).eval()
    ids, mask, *_ = k.collate_texts([([row], 0) for row in rows], "cpu")
    close(k.sequence_logits(model, ids, mask), theirs)
    for other in (0, 1, TOO_LARGE):
        wide, wide_mask = torch.full((4, 9), other), torch.nn.functional.pad(mask, (0, 4), value=False)
        wide[wide_mask] = ids[mask]
        close(k.sequence_logits(model, wide, wide_mask), theirs)


@every_architecture
def test_a_prompt_that_is_read_once_changes_nothing(scripts, classifier_folder, arch):
    """Scores and gradients are transformers' for each text alone, and fewer tokens run through the model; rows of 3, 2 and 3 texts."""
    k, folder = scripts["reward_model"], classifier_folder(arch)
    rows = [[numbers(p, seed=p).tolist() + numbers(r, seed=10 + p + r).tolist() for r in sizes]
            for p, sizes in ((9, (4, 1, 6)), (7, (2, 5)), (12, (3, 3, 1)))]  # fmt: skip
    rows[0].append(rows[0][0][:])  # a text twice
    ids, mask, exists, _ = k.collate_texts([(texts, 0) for texts in rows], "cpu")
    model, alone = (k.load_model(transformers.AutoModelForSequenceClassification, folder).eval() for _ in range(2))
    read = []
    hook = model.base_model.register_forward_pre_hook(lambda _, args, inputs: read.append(inputs["input_ids"].numel()), with_kwargs=True)
    ours = k.Classifier(model, share=True)(ids, mask, exists.shape[1])
    hook.remove()
    assert len(read) == 2 and sum(read) == ids.numel() - 7 * (len(ids) - len(rows))  # 7 tokens are those of every row
    alone.config.pad_token_id = -1
    theirs = torch.cat([alone(input_ids=torch.tensor([text])).logits for texts in rows for text in texts])
    close(ours[exists.flatten()], theirs)
    weights = torch.linspace(-1, 2, theirs.numel()).view(theirs.shape)
    (ours[exists.flatten()] * weights).sum().backward()
    (theirs * weights).sum().backward()
    for p, q in zip(model.parameters(), alone.parameters()):
        close(*(torch.zeros_like(x) if x.grad is None else x.grad for x in (p, q)), atol=1e-4)


@pytest.mark.parametrize("rows", [[[[5, 6], [5, 6]], [[7, 6], [5, 6]]], [[[5], [5]]], [[[5, 6, 7], [5]]], [[[5, 6, 9, 4], [5, 7, 9, 3]]]])
def test_only_a_common_beginning_is_shared(scripts, classifier_folder, rows):
    k = scripts["reward_model"]
    model = k.load_model(transformers.AutoModelForSequenceClassification, classifier_folder("gpt2")).eval()
    ids, mask, *_ = k.collate_texts([(texts, 0) for texts in rows], "cpu")
    close(k.shared_prompt_scores(model, ids, mask, 2), logits_alone(classifier_folder("gpt2"), [x for texts in rows for x in texts]))


def test_an_encoder_shares_no_prompt(scripts, classifier_folder):
    """All its tokens look at each other."""
    k, folder = scripts["reward_model"], classifier_folder("distilbert")
    model, rows = k.load_model(transformers.AutoModelForSequenceClassification, folder).eval(), [[5, 6, 7, 8], [5, 6, 7, 9, 3]]
    ids, mask, *_ = k.collate_texts([(rows, 0)], "cpu")
    close(k.Classifier(model, share=True)(ids, mask, 2), logits_alone(folder, rows))


def test_sequence_logits_of_an_encoder(scripts, classifier_folder):
    k, folder = scripts["reward_model"], classifier_folder("distilbert")
    rows = [[5, 6, 7, 8, 9], [11], [12, 13, 0]]
    model = k.load_model(transformers.AutoModelForSequenceClassification, folder).eval()
    ids, mask, *_ = k.collate_texts([([row], 0) for row in rows], "cpu")
    close(k.sequence_logits(model, ids, mask), logits_alone(folder, rows))
    close(k.Classifier(model).train()(ids, mask), logits_alone(folder, rows))  # no dropout is left


@shipping("gae")
@pytest.mark.parametrize("arch, pad", [("distilbert", "own"), ("gpt2", "own"), ("gpt2", "eos"), ("llama", "eos")])
def test_the_reward_of_a_text_is_the_classifiers(k, classifier_folder, arch, pad):
    """In batches of 2, as transformers' for each text alone."""
    folder = classifier_folder(arch, pad)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    classify, model = k.load_classifier(folder, 2, torch.device("cpu"))
    texts = TEXTS[:3]  # without a special token in the text: responses are decoded without
    assert model.config.num_labels == 2
    close(classify(texts), logits_alone(folder, tokenizer(texts).input_ids))


def test_opinion_of_a_label(scripts, classifier_folder):
    """Prompt and response as one text; the label in any case: its logit, and its probability among the labels."""
    folder, texts = classifier_folder("distilbert"), TEXTS[:3]
    theirs = logits_alone(folder, transformers.AutoTokenizer.from_pretrained(folder)(texts).input_ids)
    opinion = scripts["ppo_sentiment"].opinion_of("Positive", folder, 2, torch.device("cpu"))
    logits, probabilities = opinion([text[:4] for text in texts], [text[4:] for text in texts])
    close(logits, theirs[:, 1])
    close(probabilities, theirs.softmax(-1)[:, 1])


@pytest.mark.parametrize("labels", [("negative", "positive"), ("POSITIVE", "NEGATIVE")])
def test_the_reward_is_asked_for_by_name(scripts, classifier_folder, labels):
    """Trick 22: by the label's name or number, not by its place after sorting by score."""
    k, folder = scripts["ppo_sentiment"], classifier_folder("distilbert", labels=labels)
    logits = logits_alone(folder, transformers.AutoTokenizer.from_pretrained(folder)(TEXTS[:3]).input_ids)
    number = [label.lower() for label in labels].index("positive")
    for name in ("positive", str(number)):
        reward = k.load_reward(k.Args(reward_model_path=folder, reward_label=name), torch.device("cpu"))
        close(reward([""] * 3, TEXTS[:3]), logits[:, number])
    with pytest.raises(k.UserError, match="joy"):
        k.load_reward(k.Args(reward_model_path=folder, reward_label="joy"), torch.device("cpu"))


def test_a_reward_model_may_have_another_tokenizer(scripts, tiny_classifier):
    """Trick 23."""
    k, folder = scripts["ppo_sentiment"], tiny_classifier("other")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 300 and tokenizer(TEXTS[0]).input_ids != transformers.AutoTokenizer.from_pretrained(
        ROOT / "checkpoints/reviews-lm")(TEXTS[0]).input_ids  # fmt: skip
    reward = k.load_reward(k.Args(reward_model_path=folder), torch.device("cpu"))
    close(reward([""] * 3, TEXTS[:3]), logits_alone(folder, tokenizer(TEXTS[:3]).input_ids)[:, 1])


# ---- sft -------------------------------------------------------------------------------------------------------------
PAIRS = [([5, 6, 7, 8, 0], [5, 6, 7, 8, 0]), ([9, 0], [9, 0]), ([3, 4, 5, 6, 7, 8, 9, 0], [-100] * 3 + [6, 7, 8, 9, 0]),
         ([12, 13, 14, 0], [12, 13, 14, 0]), ([20, 21, 22], [20, 21, 22])]  # fmt: skip


@pytest.fixture
def sft(scripts):
    return scripts["sft"]


def packed_logits(sft, model, ids, positions):
    body, head = sft.body_and_head(model)
    return torch.nn.functional.linear(sft.document_states(body, ids, positions), head.weight, head.bias)


@every_architecture
def test_packed_documents_do_not_see_each_other(sft, language_model, arch):
    """The logits of documents in rows of 16 tokens are each document's alone. BLOOM takes no positions: one document a row."""
    model = language_model(arch)
    rows = sft.pack(PAIRS, 16, arch != "bloom")
    assert [len(row) for row in rows] == ([1] * 5 if arch == "bloom" else [3, 2])
    ids, labels, positions = sft.collate_rows(rows, "cpu")
    with torch.no_grad():
        logits = packed_logits(sft, model, ids, positions)
    for i, row in enumerate(rows):
        at = 0
        for document, _ in row:
            ours = logits[i, at : at + len(document)].double().log_softmax(-1)
            close(ours, alone(model, torch.tensor(document)))
            at += len(document)


def test_bloom_is_never_packed_silently(sft, language_model):
    """A model without position ids cannot keep packed documents apart: an error, or the right logits, but not the wrong ones."""
    model = language_model("bloom")
    ids, _, positions = sft.collate_rows([PAIRS[:2]], "cpu")
    try:
        with torch.no_grad():
            logits = packed_logits(sft, model, ids, positions)
    except (TypeError, ValueError, sft.UserError):
        return
    close(logits[0, 5:7].double().log_softmax(-1), alone(model, torch.tensor(PAIRS[1][0])))


@every_architecture
def test_losses_are_transformers_own(sft, language_model, arch):
    """Sum over the labels / their number, of a padded batch, against model(labels=...), with a prompt left out."""
    model = language_model(arch)
    ids, labels, positions = sft.collate_rows([[pair] for pair in PAIRS], "cpu")
    with torch.no_grad():
        losses, right = sft.LanguageModel(model)(ids, labels, positions)
        theirs = model(input_ids=ids, labels=labels)
    assert losses.shape == right.shape == (5, 7)
    count = (labels[:, 1:] != -100).sum()
    close(losses.sum() / count, theirs.loss)
    assert count == (labels != -100).sum()  # what the script divides by: no label stands at the first place
    greedy = theirs.logits[:, :-1].argmax(-1)
    assert right.sum() == ((greedy == labels[:, 1:]) & (labels[:, 1:] != -100)).sum()


def test_the_loss_of_packed_rows_is_the_loss_of_all_documents(sft, language_model):
    """And its gradient: packing changes the speed alone."""
    sums, slopes = [], []
    for packing in (True, False):
        model = copy.deepcopy(language_model("llama"))
        ids, labels, positions = sft.collate_rows(sft.pack(PAIRS, 16, packing), "cpu")
        losses, _ = sft.LanguageModel(model)(ids, labels, positions)
        losses.sum().backward()
        sums.append(losses.detach().sum())
        slopes.append(model.get_input_embeddings().weight.grad)
    close(sums[0], sums[1], atol=1e-4)
    close(slopes[0], slopes[1], atol=1e-4)


def sft_args(sft, **flags):
    return sft.Args(dataset_name="a_folder", **flags)


@pytest.mark.parametrize("pad", ["own", "eos"])
def test_eos_is_learned_at_the_end_of_every_document(sft, tiny_lm, language_model, pad):
    """Trick 8: text + EOS, all of it learned but the first token, also where pad is EOS. The loss at EOS is transformers' own."""
    tokenizer, texts = sft.load_tokenizer(tiny_lm("gpt2", pad)), ["A fine film.", "No.", "I liked the thief, and the cook."]
    assert (tokenizer.pad_token == tokenizer.eos_token) == (pad == "eos")
    pairs = sft.documents(Dataset.from_dict(dict(text=texts)), tokenizer, sft_args(sft))
    for text, (ids, labels) in zip(texts, pairs):
        assert ids == labels == [*tokenizer(text).input_ids, tokenizer.eos_token_id]
    model = language_model("gpt2", pad)
    for packing in (True, False):
        ids, labels, positions = sft.collate_rows(sft.pack(pairs, 64, packing), "cpu")
        losses, _ = sft.LanguageModel(model)(ids, labels, positions)
        at_eos = losses.detach()[labels[:, 1:] == tokenizer.eos_token_id]
        close(at_eos, torch.stack([-alone(model, torch.tensor(ids))[-2, tokenizer.eos_token_id] for ids, _ in pairs]))


def test_labels_stand_on_completions_alone(sft, tiny_lm):
    """Trick 7: prompt and completion are tokenised apart, and the completion begins with its own space."""
    tokenizer = sft.load_tokenizer(tiny_lm("gpt2"))
    rows = dict(prompt=["A film", "", "The end of"], completion=[" about a cook.", "Short.", " it"])
    pairs = sft.documents(Dataset.from_dict(rows), tokenizer, sft_args(sft))
    for prompt, completion, (ids, labels) in zip(rows["prompt"], rows["completion"], pairs):
        before, after = tokenizer(prompt).input_ids, [*tokenizer(completion).input_ids, tokenizer.eos_token_id]
        assert ids == before + after and labels == [-100] * len(before) + after


def test_labels_stand_on_prompts_too_where_asked(sft, tiny_lm):
    """--no-completion-only-loss: every token is a label, the prompt's too."""
    tokenizer = sft.load_tokenizer(tiny_lm())
    rows = sft.datasets.Dataset.from_dict(dict(prompt=["A question?"], completion=[" An answer."]))
    [(ids, labels)] = sft.documents(rows, tokenizer, sft_args(sft, completion_only_loss=False))
    assert ids == labels == tokenizer("A question?").input_ids + tokenizer(" An answer.").input_ids + [tokenizer.eos_token_id]


def test_a_cut_document_has_no_eos(sft, tiny_lm):
    """And documents with nothing to learn, or nothing within max_length, are left out."""
    tokenizer = sft.load_tokenizer(tiny_lm("gpt2"))
    long = "The cook and the thief went to the sea, and then they came home. " * 3
    ids = tokenizer(long).input_ids
    pairs = sft.documents(Dataset.from_dict(dict(text=[long, "", None, "No."])), tokenizer, sft_args(sft, max_length=10))
    assert pairs[0] == (ids[:10], ids[:10]) and len(pairs) == 2 and pairs[1][0][-1] == tokenizer.eos_token_id
    rows = Dataset.from_dict(dict(prompt=[long, "A film"], completion=[" and more", " I like"]))
    pairs = sft.documents(rows, tokenizer, sft_args(sft, max_length=10))
    assert len(pairs) == 1 and pairs[0][0][: len(tokenizer("A film").input_ids)] == tokenizer("A film").input_ids


def test_pack_keeps_every_document_whole(sft):
    rows = sft.pack(PAIRS, 12, True)
    assert [pair for row in rows for pair in row] == PAIRS and max(sum(len(ids) for ids, _ in row) for row in rows) <= 12
    assert [len(row) for row in sft.pack(PAIRS, 12, False)] == [1] * 5


@pytest.mark.parametrize("name", ["sft", "ppo_sentiment"])
def test_train_mode_has_no_dropout(scripts, name, tiny_lm, tmp_path):
    """Trick 13, where the saved config has dropout of every kind, and LoRA on top."""
    k = scripts[name]
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_lm("gpt2"))
    model.config.update(dict(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5, summary_first_dropout=0.5))
    model.save_pretrained(tmp_path)
    loaded = k.load_model(transformers.AutoModelForCausalLM, str(tmp_path))
    loaded = k.add_lora(loaded, k.Args(lora_r=2)).train()
    ids = numbers(2, 12)
    assert torch.equal(loaded(input_ids=ids).logits, loaded(input_ids=ids).logits)


# ---- the context of a model ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("kind, sizes, tokens", [("Roberta", dict(max_position_embeddings=66, pad_token_id=1), 64),
                                                 ("DistilBert", dict(max_position_embeddings=66, n_layers=1, dim=32, n_heads=4), 66),
                                                 ("GPT2", dict(n_positions=66), 66), ("Bloom", dict(), 10**9)])  # fmt: skip
def test_the_context_is_what_a_model_takes(scripts, name, kind, sizes, tokens):
    """One token more ends in an error. BLOOM has no limit."""
    shape = dict(vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=4) if kind != "DistilBert" else dict(vocab_size=99)
    model = getattr(transformers, kind + "Model")(getattr(transformers, kind + "Config")(**shape | sizes)).eval()
    assert scripts[name].context_of(model) == tokens
    if tokens < 10**9:
        model(torch.full((1, tokens), 5))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, tokens + 1), 5))
