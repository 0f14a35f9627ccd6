"""Whole runs of ppo_sentiment.py on tiny models: what each option does to weights, rewards, tokens and files."""

import math

import peft
import pytest
import torch
import transformers
from run_tools import distance, eos_prone, reward_file, rows_of, same, spy, weights
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

pytest_plugins = ["run_fixtures"]
SCORE = "return [float(len(r) % 7) - 3 for r in responses]"  # some reward that varies


@pytest.fixture
def script(scripts):
    """ppo_sentiment.py as a module."""
    return scripts["ppo_sentiment"]


def start_of(folder):
    """The weights of a folder as plain transformers loads them, tied ones once under the name that save_pretrained keeps."""
    return weights(folder)


# ---- Learning rate 0 -------------------------------------------------------------------------------------------------
EQUAL = dict(query_min_length=6, response_min_length=6, stop_token=None)


@pytest.mark.parametrize("lengths, off", [(EQUAL, 0.0), ({}, 1e-5)], ids=["equal", "drawn"])
def test_learning_rate_0_changes_nothing(ppo, tiny_lm, lengths, off):
    """Trick 10: the first ratio is 1, the KL 0, and the weights stay to the bit, in both updates. Rows of one length run through
    the update in the rollout's own width, so theirs is exactly 1; among others the width differs, and so does the rounding.
    """
    model, folder, metrics = ppo(learning_rate=0.0, total_episodes=16, **lengths)
    for row in metrics:
        assert abs(row["val/ratio"] - 1) <= off and row["policy/approxkl_avg"] <= off**2
        assert (row["objective/kl"], row["policy/clipfrac_avg"]) == (0.0, 0.0)
    assert same(weights(folder / "model"), start_of(tiny_lm()))
    assert not model.value_head.weight.any()


def test_other_splits_of_the_batch_sample_the_same_tokens(ppo, script, monkeypatch):
    """Micro-batches and rollout batches of other sizes: the same tokens, and a ratio within 1e-5 of 1."""
    seen = []
    for i, (rollout, n, accumulation, minibatches) in enumerate([(8, 4, 1, 2), (3, 2, 2, 2), (1, 1, 8, 1)]):
        with monkeypatch.context() as patch:
            calls = spy(patch, script, "generate")
            sizes = dict(per_device_train_batch_size=n, gradient_accumulation_steps=accumulation, num_mini_batches=minibatches)
            _, _, metrics = ppo(f"run{i}", learning_rate=0.0, local_rollout_forward_batch_size=rollout, **sizes)
        assert abs(metrics[0]["val/ratio"] - 1) < 1e-5 and abs(metrics[0]["objective/kl"]) < 1e-5
        tokens, lengths = (torch.cat(parts) for parts in zip(*(result for _, result in calls)))
        written = [row[:n].tolist() for row, n in zip(tokens, lengths)]
        seen.append((written, metrics[0]["objective/scores"]))
    assert seen[0][0] == seen[1][0] == seen[2][0] and len(seen[0][0]) == 16
    assert seen[0][1] == pytest.approx(seen[1][1], abs=1e-5) == pytest.approx(seen[2][1], abs=1e-5)


MODULES = dict(ppo_sentiment="PolicyAndValue", ppo_dialog="PolicyAndValue", rloo_tldr="PolicyAndReference")  # script -> what it trains


@pytest.mark.parametrize("name", MODULES)
def test_sanity_says_that_all_is_well(scripts, small, capsys, name):
    """--sanity ends with a line that says so, and trains nothing."""
    _, folder = scripts[name].train(small(name, sanity=True, total_episodes=800))
    assert "sanity: at learning rate 0 the ratio is 1, the KL 0" in capsys.readouterr().out
    assert len(rows_of(folder)) == 2 and all(row["lr"] == 0 for row in rows_of(folder)) and not (folder / "model").exists()


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("method", ["forward", "reference_logprobs"])
def test_sanity_finds_a_difference(scripts, small, monkeypatch, name, method):
    """--sanity fails when rollout and update, or policy and reference, are not the same function."""
    module = getattr(scripts[name], MODULES[name])
    original, calls = getattr(module, method), []

    def other(self, *args):
        calls.append(1)
        result = original(self, *args)
        return result + 0.1 if method == "reference_logprobs" else (result[0] + 0.01 * len(calls), *result[1:])

    monkeypatch.setattr(module, method, other)
    with pytest.raises(scripts[name].UserError, match="--sanity"):
        scripts[name].train(small(name, sanity=True))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_the_sampled_distribution_is_the_scored_one(script, tiny_lm, temperature):
    """Tokens are drawn from softmax(logits / temperature), and their log-probabilities, old, new and reference, are of that."""
    model = AutoModelForCausalLM.from_pretrained(tiny_lm()).eval()
    torch.manual_seed(3)
    prompts, uniforms, room = [torch.randint(3, 1000, (n,)) for n in (2, 5, 6)], torch.rand(3, 7), torch.full((3,), 7)
    ids = torch.stack([torch.nn.functional.pad(prompt, (6 - len(prompt), 0)) for prompt in prompts])
    mask = script.length_mask(torch.tensor([2, 5, 6]), 6).flip(1)
    tokens, lengths = script.generate(model, ids, mask, room, uniforms, -1, temperature)
    whole = script.PolicyAndValue(model, model)
    with torch.no_grad():
        here = torch.cat([ids, tokens], 1), torch.cat([mask, torch.ones_like(tokens, dtype=torch.bool)], 1), 7, temperature
        scored, entropies, _ = whole(*here)
        torch.testing.assert_close(whole.reference_logprobs(*here), scored)
        for i, prompt in enumerate(prompts):  # one by one, without pads, in plain transformers
            logits = model(torch.cat([prompt, tokens[i]])[None]).logits[0, len(prompt) - 1 : -1]
            logp = (logits / temperature).log_softmax(-1)
            assert torch.equal(script.sample_tokens((logits / temperature).softmax(-1), uniforms[i]), tokens[i])
            torch.testing.assert_close(logp.gather(1, tokens[i][:, None])[:, 0], scored[i], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(-(logp.exp() * logp).sum(1), entropies[i], atol=1e-4, rtol=1e-4)
            if temperature != 1:
                assert not torch.equal(script.sample_tokens(logits.softmax(-1), uniforms[i]), tokens[i])


def test_responses_keep_their_first_space(ppo, script, metaspace_lm, monkeypatch):
    """Trick 7: prompt + response is the text of all tokens, also where a tokenizer drops the first space of what it decodes."""
    calls = spy(monkeypatch, script, "rollout")
    ppo(model_name_or_path=metaspace_lm)
    b, prompts, responses = calls[1][1]
    tokenizer = AutoTokenizer.from_pretrained(metaspace_lm)
    whole = tokenizer.batch_decode([row[m].tolist() for row, m in zip(b["ids"], b["mask"])], skip_special_tokens=True)
    assert [p + r for p, r in zip(prompts, responses)] == whole and any(r.startswith(" ") for r in responses)


# ---- Architectures ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", ["gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "llama", "qwen2"])
def test_architectures(ppo, tiny_lm, arch):
    """One update moves the weights, and model/ in plain transformers is the policy that was trained."""
    model, folder, metrics = ppo(model_name_or_path=tiny_lm(arch))
    assert math.isfinite(metrics[0]["objective/kl"]) and metrics[0]["objective/kl"] == 0 and metrics[0]["val/ratio"] != 1
    before, after = start_of(tiny_lm(arch)), weights(folder / "model")
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) >= 0.8 * len(before) and model.value_head.weight.abs().min() > 0
    plain, ids = AutoModelForCausalLM.from_pretrained(folder / "model").eval(), torch.randint(0, 1000, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model.policy.eval()(ids).logits)


def test_readme_snippet(ppo):
    """The trained model writes text from a typed prompt in plain transformers."""
    _, folder, _ = ppo()
    tokenizer, model = AutoTokenizer.from_pretrained(folder / "model"), AutoModelForCausalLM.from_pretrained(folder / "model")
    torch.manual_seed(0)
    out = model.generate(**tokenizer("The film was", return_tensors="pt"), max_new_tokens=12, do_sample=True, pad_token_id=0)
    text = tokenizer.decode(out[0], skip_special_tokens=True)
    assert text.startswith("The film was") and len(text) > len("The film was") + 4


# ---- LoRA ------------------------------------------------------------------------------------------------------------
LORA = dict(lora_r=4, lora_alpha=8)


def test_lora_trains_the_adapter_alone(ppo, script, tiny_lm, monkeypatch):
    """The base keeps its bits, adapter and value head move, model/ is base + adapter and loads in plain transformers."""
    import peft

    seen = {}

    def look(policy, *rest):  # before the adapter is merged
        seen.update({name: p.detach().clone() for name, p in policy.named_parameters()})
        return save(policy, *rest)

    save = script.save_policy
    monkeypatch.setattr(script, "save_policy", look)
    model, folder, metrics = ppo(**LORA)
    start = dict(AutoModelForCausalLM.from_pretrained(tiny_lm()).named_parameters())
    base = {name.removeprefix("base_model.model.").replace("base_layer.", ""): p for name, p in seen.items() if "lora_" not in name}
    assert same(base, start)
    assert all(p.abs().max() > 0 for name, p in seen.items() if "lora_B" in name) and model.value_head.weight.abs().min() > 0
    state = torch.load(folder / "checkpoints/000001/state.pt", weights_only=True)
    assert all("lora_" in name or "value_head" in name for name in state["parameters"])
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_lm()), folder / "adapter").eval()
    merged, ids = AutoModelForCausalLM.from_pretrained(folder / "model").eval(), torch.randint(0, 1000, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, atol=1e-4, rtol=1e-4)
    assert metrics[0]["objective/kl"] == 0


def test_lora_from_a_trained_adapter_starts_at_kl_0(ppo, script, small, tiny_lm, tmp_path):
    """The reference is the start, adapter included, and not the base under it."""
    import peft

    torch.manual_seed(2)
    base = AutoModelForCausalLM.from_pretrained(tiny_lm())
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True))
    adapted.save_pretrained(tmp_path / "start")
    AutoTokenizer.from_pretrained(tiny_lm()).save_pretrained(tmp_path / "start")
    start = dict(model_name_or_path=str(tmp_path / "start"), **LORA)
    model = script.build_policy(small("ppo_sentiment", **start)).eval()
    ids = torch.randint(0, 1000, (2, 12))
    with torch.no_grad():
        adapted.eval()
        torch.testing.assert_close(model.policy(ids).logits, adapted(ids).logits, atol=1e-4, rtol=1e-4)
        with adapted.disable_adapter():
            assert (model.policy(ids).logits - adapted(ids).logits).abs().max() > 0.1
        here = (ids, torch.ones_like(ids, dtype=torch.bool), 6, 1.0)
        assert torch.equal(model(*here)[0], model.reference_logprobs(*here))
    _, folder, metrics = ppo(total_episodes=16, **start)
    assert metrics[0]["objective/kl"] == 0 and metrics[1]["objective/kl"] != 0
    whole, parts = (script.load_model(AutoModelForCausalLM, folder / name) for name in ("model", "adapter"))
    assert distance(whole.state_dict(), parts.state_dict()) < 1e-5  # the new adapter knows that it stands on another one
    with pytest.raises(script.UserError, match="merge it first"):
        script.build_policy(small("ppo_sentiment", **start | dict(load_in_8bit=True)))


def test_lora_share_of_gpt2(script):
    """GPT-2 with rank 16 on c_attn and a value head trains 590,593 of 125,030,401 parameters."""
    with torch.device("meta"):
        policy = transformers.GPT2LMHeadModel(transformers.GPT2Config())
        policy = script.add_lora(policy, script.Args(lora_r=16, lora_alpha=32, lora_target_modules="c_attn"))
        model = script.PolicyAndValue(policy)
    assert sum(p.numel() for p in script.trainable(model).values()) == 590_593
    assert sum(p.numel() for p in model.parameters()) == 125_030_401


# ---- Optimizers and schedules ----------------------------------------------------------------------------------------
OPTIMIZERS = ["torch.optim.Adam", "torch.optim.AdamW", "torch.optim.SGD", "bitsandbytes.optim.Adam8bit", "bitsandbytes.optim.Lion"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(ppo, tiny_lm, monkeypatch, name):
    """Each optimizer, by its dotted name, is the one that steps, and moves the weights."""
    from pydoc import locate

    steps, step = [], locate(name).step
    monkeypatch.setattr(locate(name), "step", lambda self, *args, **kwargs: (steps.append(type(self)), step(self, *args, **kwargs))[1])
    _, folder, _ = ppo(optimizer=name, learning_rate=1e-3)
    assert steps == [locate(name)] * 4
    before, after = start_of(tiny_lm()), weights(folder / "model")
    assert sum(not torch.equal(before[key], after[key]) for key in before) >= 0.8 * len(before)


def test_sgd_steps_against_the_gradient(script):
    """The first step of SGD is -lr * gradient."""
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0, -3.0]))
    optimizer, _ = script.make_optimizer(script.Args(optimizer="torch.optim.SGD", learning_rate=0.5), [p], 3)
    p.grad = torch.tensor([1.0, -4.0, 0.5])
    optimizer.step()
    assert p.tolist() == [0.5, 4.0, -3.25]


def test_adam_eps_reaches_adam(script):
    """--adam-eps is Adam's epsilon: with a huge one the step is lr * gradient / eps."""
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer, _ = script.make_optimizer(script.Args(optimizer="torch.optim.Adam", learning_rate=1.0, adam_eps=1e6), [p], 3)
    p.grad = torch.tensor([2.0])
    optimizer.step()
    assert p.item() == pytest.approx(-2e-6, rel=1e-4)


def schedule(kind, rate, warmup, updates):
    """Learning rates of transformers' schedule, of which exponential is none."""
    if kind == "exponential":
        falling = [rate * 0.01 ** (step / (updates - warmup)) for step in range(updates - warmup)]
        return [rate * step / warmup for step in range(warmup)] + falling
    optimizer, rates = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate), []
    scheduler = transformers.get_scheduler(kind, optimizer, warmup, updates)
    for _ in range(updates):
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("kind", ["constant", "constant_with_warmup", "linear", "cosine", "inverse_sqrt", "polynomial", "exponential"])
def test_schedules(script, kind, warmup):
    """The learning rates of 11 updates are those of transformers, with and without warm-up."""
    args = script.Args(learning_rate=1e-2, lr_scheduler_type=kind, warmup_ratio=warmup / 11)
    optimizer, scheduler = script.make_optimizer(args, [torch.nn.Parameter(torch.zeros(1))], 11)
    rates = []
    for _ in range(11):
        rates += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(schedule(kind, 1e-2, warmup, 11), rel=1e-12, abs=0)


@pytest.mark.parametrize("kind", ["constant", "constant_with_warmup", "linear", "cosine", "inverse_sqrt", "polynomial", "exponential"])
def test_schedules_at_learning_rate_0(script, kind):
    """Nothing is divided by a learning rate of 0, which --sanity has."""
    args = script.Args(learning_rate=0.0, lr_scheduler_type=kind, warmup_ratio=0.4)
    _, scheduler = script.make_optimizer(args, [torch.nn.Parameter(torch.zeros(1))], 5)
    assert scheduler.get_last_lr() == [0.0]


def test_a_run_that_is_made_longer_takes_the_new_schedule(ppo, script):
    """Its next update has the learning rate of the longer curve, not the 0 at the end of the old one."""
    _, folder, _ = ppo(total_episodes=16, lr_scheduler_type="linear")
    script.train(script.parse_args(["--resume", str(folder), "--total-episodes", "32"]))
    assert [row["lr"] for row in rows_of(folder)] == pytest.approx([1e-2, 0.5e-2, 0.5e-2, 0.25e-2])


def test_dtype_auto_wants_units_for_bf16(script, monkeypatch):
    """Where a GPU only emulates bf16, --dtype auto is float32."""
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert script.pick_dtype(script.Args(dtype="auto"), torch.device("cuda")) is torch.float32


@pytest.mark.parametrize("name", ["ppo_sentiment", "rloo_tldr"])
def test_the_reward_reads_the_prompt_with_its_special_tokens(scripts, tiny_lm, name):
    """A prompt's marks, as of a chat, reach the reward; those that a response ends with do not."""
    script, asked, args = scripts[name], [], scripts[name].Args(temperature=1.0)
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_lm()), AutoModelForCausalLM.from_pretrained(tiny_lm()).eval()
    text = f"{tokenizer.eos_token}The film{tokenizer.eos_token} was"
    ids = torch.tensor([tokenizer(text).input_ids] * 2)
    mask, uniforms = torch.ones_like(ids, dtype=torch.bool), torch.rand(2, 5, generator=torch.Generator().manual_seed(0))
    reward = lambda prompts, responses: (asked.extend(zip(prompts, responses)), torch.zeros(len(prompts)))[1]  # noqa: E731
    if name == "rloo_tldr":
        script.rollout_groups(script.PolicyAndReference(model, model), tokenizer, reward, (ids, mask, uniforms[None]), 0, args)
    else:
        batch = (ids, mask, torch.full((2,), 5), uniforms)
        script.rollout(script.PolicyAndValue(model, model), tokenizer, reward, batch, 0, args)
    assert [prompt for prompt, _ in asked] == [text] * 2 and all(response for _, response in asked)
    assert not any(tokenizer.eos_token in response for _, response in asked)


def test_the_learning_rate_steps_once_an_update(ppo, tmp_path):
    """The logged learning rates are the schedule's, one step an update, with two updates of warm-up."""
    short = dict(per_device_train_batch_size=2, num_mini_batches=1, num_ppo_epochs=2, response_min_length=1, response_length=2)
    reward_fn = reward_file(tmp_path, SCORE)
    _, _, rows = ppo(total_episodes=10, lr_scheduler_type="cosine", warmup_ratio=0.4, num_eval_prompts=2, reward_fn=reward_fn, **short)
    assert [row["lr"] for row in rows] == pytest.approx(schedule("cosine", 1e-2, 2, 5), rel=1e-6, abs=1e-12)


# ---- Memory ----------------------------------------------------------------------------------------------------------
def test_shared_layers(ppo, script, small, tiny_lm):
    """Shared parameters are the same objects in policy and reference and stay; the rest of the policy moves, the reference does not."""
    model = script.build_policy(small("ppo_sentiment", num_shared_layers=1))
    policy, reference = dict(model.policy.named_parameters()), dict(model.reference.named_parameters())
    shared = {name for name in policy if policy[name] is reference[name]}
    assert shared == {name for name in policy if ".wte." in name or ".wpe." in name or ".h.0." in name}
    assert all(policy[name].requires_grad == (name not in shared) for name in policy)
    assert not any(p.requires_grad for p in reference.values())
    model, folder, _ = ppo(num_shared_layers=1)
    start = dict(AutoModelForCausalLM.from_pretrained(tiny_lm()).named_parameters())
    assert same(start, {name: p.detach() for name, p in model.reference.named_parameters()})
    for name, p in model.policy.named_parameters():
        assert torch.equal(p, start[name]) == (name in shared), name


def test_reference_in_8_bit(ppo, script, small):
    """Without LoRA the frozen reference is in int8, in about a quarter of the memory, and the policy stays in fp32."""
    model = script.build_policy(small("ppo_sentiment", load_in_8bit=True))
    linear = {name: (p, dict(model.policy.named_parameters())[name]) for name, p in model.reference.named_parameters() if ".c_" in name}
    linear = {name: pair for name, pair in linear.items() if name.endswith("weight")}
    assert len(linear) == 8 and all(p.dtype == torch.int8 and full.dtype == torch.float32 for p, full in linear.values())
    size = [sum(p.numel() * p.element_size() for p in column) for column in zip(*linear.values())]
    assert 0.25 <= size[0] / size[1] < 0.3
    _, _, metrics = ppo(load_in_8bit=True)
    assert 0 < abs(metrics[0]["objective/kl"]) < 0.5  # rounding, and no more


def test_lora_on_a_base_in_8_bit(ppo, script, small, tiny_lm):
    """The base is in int8 and stays; the adapter trains; model/ is the adapter, which peft loads on the fp32 base."""
    flags = dict(load_in_8bit=True, **LORA)
    start = script.build_policy(small("ppo_sentiment", **flags)).policy.get_base_model().state_dict()
    model, folder, metrics = ppo(total_episodes=16, **flags)
    base = model.policy.get_base_model().state_dict()
    frozen = [name for name in base if name.endswith("weight") and base[name].dtype == torch.int8]
    assert len(frozen) == 8 and all(torch.equal(base[name], start[name]) for name in frozen)
    assert all(x.abs().max() > 0 for name, x in base.items() if "lora_B" in name)
    assert metrics[0]["objective/kl"] == 0 and metrics[1]["objective/kl"] != 0
    assert (folder / "model/adapter_config.json").exists()
    again = script.load_model(AutoModelForCausalLM, folder / "model").eval()
    ids = torch.randint(0, 1000, (2, 9))
    with torch.no_grad():
        ours, plain = (m.eval()(ids).logits.log_softmax(-1) for m in (model.policy, again))
    assert (ours - plain).abs().max() < 0.5 and (ours - plain).abs().mean() < 0.05  # but for the rounding of the base


@pytest.mark.parametrize("lora", [{}, LORA])
def test_gradient_checkpointing(ppo, lora):
    """Activations are computed again in the backward pass, with the same loss and the same weights."""
    results = []
    for on in (False, True):
        model, folder, metrics = ppo(f"run-{on}", gradient_checkpointing=on, optimizer="torch.optim.SGD", learning_rate=0.1, **lora)
        body = model.policy.get_base_model() if lora else model.policy
        assert body.is_gradient_checkpointing == on
        results.append((metrics[0], weights(folder / "model")))
    assert results[0][0]["loss/policy_avg"] == pytest.approx(results[1][0]["loss/policy_avg"], abs=1e-6)
    assert results[0][0]["loss/value_avg"] == pytest.approx(results[1][0]["loss/value_avg"], abs=1e-6)
    assert distance(results[0][1], results[1][1]) < 1e-6


@pytest.mark.parametrize("flags", [dict(bf16=True), dict(dtype="bfloat16")])
def test_bf16(ppo, flags, monkeypatch):
    """Products in bf16: close to fp32's numbers and not the same; weights stay in fp32, and models attend by the script's `attention`."""
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    _, _, full = ppo("full", learning_rate=0.0)
    model, folder, half = ppo("half", learning_rate=0.0, **flags)
    assert {p.dtype for p in model.parameters()} == {torch.float32} == {p.dtype for p in weights(folder / "model").values()}
    name = "objective/entropy"
    assert half[0][name] != full[0][name] and half[0][name] == pytest.approx(full[0][name], rel=0.1)
    assert half[0]["val/ratio"] == pytest.approx(1, abs=1e-2) and abs(half[0]["objective/kl"]) < 1e-2
    assert transformers.AttentionInterface()["sdpa"].__name__ == "attention"


def test_what_stands_beside_the_script_is_found(script, tiny_lm, tmp_path, monkeypatch):
    """A folder is named from the script's own too: its weights, its value head and what an adapter is."""
    model = script.build_policy(script.Args(model_name_or_path=tiny_lm()))
    model.value_head.bias.data.fill_(2)
    model.policy.save_pretrained(tmp_path / "lm")
    script.save_value(model, tmp_path / "lm")
    peft.get_peft_model(model.policy, peft.LoraConfig(r=2, target_modules=["c_attn"])).save_pretrained(tmp_path / "adapter")
    monkeypatch.setattr(script, "HERE", tmp_path)
    assert script.build_policy(script.Args(model_name_or_path="lm")).value_head.bias == 2
    assert script.load_model(AutoModelForCausalLM, "adapter").name_or_path == str(tmp_path / "adapter")


# ---- Value function --------------------------------------------------------------------------------------------------
def test_critic_of_its_own(ppo, script, small, tiny_lm, tmp_path):
    """The critic's weights move, values come from it and log-probabilities do not; it can be loaded again with its head."""
    model, folder, _ = ppo(value_model_path=tiny_lm("llama"), vf_coef=1.0)
    start = transformers.AutoModel.from_pretrained(tiny_lm("llama")).state_dict()
    now = model.critic.state_dict()
    assert sum(not torch.equal(start[name], now[name]) for name in start) >= 0.8 * len(start)
    ids = torch.randint(0, 1000, (3, 10))
    here, model = (ids, torch.ones_like(ids, dtype=torch.bool), 5, 1.0), model.eval()
    with torch.no_grad():
        logprobs, _, values = model(*here)
        again = script.build_policy(small("ppo_sentiment", "2", model_name_or_path=str(folder / "model"),
                                          value_model_path=str(folder / "model/critic"))).eval()  # fmt: skip
        for one, other in zip((logprobs, values), again(*here)[::2]):
            torch.testing.assert_close(one, other)
        assert values.abs().min() > 0
        next(model.critic.parameters()).mul_(2)
        moved = model(*here)
    assert torch.equal(moved[0], logprobs) and (moved[2] - values).abs().max() > 1e-3


def test_value_head_survives_saving(ppo, script, small):
    """Train, save, start again from model/: the same values."""
    model, folder, _ = ppo()
    again = script.build_policy(small("ppo_sentiment", "2", model_name_or_path=str(folder / "model"))).eval()
    ids = torch.randint(0, 1000, (3, 10))
    here = (ids, torch.ones_like(ids, dtype=torch.bool), 5, 1.0)
    with torch.no_grad():
        values = model.eval()(*here)[2]
        torch.testing.assert_close(again(*here)[2], values)
    assert values.abs().min() > 0
    assert set(load_file(folder / "model/value_head.safetensors")) == {"weight", "bias"}


# ---- Rewards ---------------------------------------------------------------------------------------------------------
def test_reward_function_gets_texts(ppo, tmp_path):
    """It is called with two lists of str of the same length, and what it returns is the logged score."""
    body = "for p, r in zip(prompts, responses):\n    open(os.path.dirname(__file__) + '/seen', 'a').write(repr((p, r)) + '\\n')\n" \
           "return [float(i) for i in range(len(prompts))]"  # fmt: skip
    _, folder, metrics = ppo(reward_fn=reward_file(tmp_path, body))
    seen = [eval(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert len(seen) == 4 + 8 + 4 and all(isinstance(p, str) and isinstance(r, str) and p for p, r in seen)
    assert metrics[0]["objective/scores"] == metrics[0]["env/reward_mean"] == 3.5
    assert [(row["prompt"], row["response"]) for row in rows_of(folder, "samples.jsonl")] == seen[4 : 4 + 4]


def test_rewarded_behaviour_is_learned(ppo, tmp_path):
    """A reward for one letter: its count rises over 15 updates."""
    body = "return [float(r.count('e')) for r in responses]"
    sizes = dict(per_device_train_batch_size=16, total_episodes=15 * 32, local_rollout_forward_batch_size=32, num_eval_prompts=32)
    model, folder, rows = ppo(reward_fn=reward_file(tmp_path, body), kl_coef=0.0, learning_rate=1e-2, **sizes)
    scores = [row["objective/scores"] for row in rows]
    assert sum(scores[-3:]) / 3 > 2 * sum(scores[:3]) / 3 + 1, scores


@pytest.mark.parametrize("body, cause", [
    ("return [float('nan')] * len(prompts)", "nan"),
    ("return [float('inf')] * len(prompts)", "inf"),
    ("return [1.0]", "list of"),
    ("return 1.0", "list of"),
    ("return None", "list of"),
    ("return ['good'] * len(prompts)", "list of"),
])  # fmt: skip
def test_broken_reward_functions(ppo, script, tmp_path, body, cause):
    """nan, a wrong number and a wrong type end in one line that names the cause."""
    with pytest.raises(script.UserError, match=cause):
        ppo(reward_fn=reward_file(tmp_path, body))


def test_raising_reward_function_keeps_its_error(ppo, script, tmp_path):
    """An exception of the user's own code ends in one line that has its kind, its words and the file, and the exception as its cause."""
    path = reward_file(tmp_path, "return [1 / 0 for _ in prompts]")
    with pytest.raises(script.UserError, match=r"ZeroDivisionError: division by zero \(.*, line \d+\)") as caught:
        ppo(reward_fn=path)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def swapped(folder, target):
    """The same classifier with its labels in the other order. -> str"""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    for p in model.classifier.parameters():
        p.data = p.data.flip(0)
    names = [model.config.id2label[1], model.config.id2label[0]]
    model.config.id2label, model.config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder).save_pretrained(target)
    return str(target)


PROMPTS, RESPONSES = ["The film", "An old sailor", "I", "What a day it was"], [" was clever and warm.", "", " felt bored", " for us all"]


def scores_of(script, small, **changes):
    """The rewards of four fixed texts under these flags."""
    return script.load_reward(small("ppo_sentiment", **changes), torch.device("cpu"))(PROMPTS, RESPONSES)


def test_reward_label(script, small, tiny_classifier, tmp_path):
    """By name in any case or by number, in both orders of the labels, the reward is that label's logit."""
    model = AutoModelForSequenceClassification.from_pretrained(tiny_classifier()).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_classifier())
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(p + r, return_tensors="pt")).logits for p, r in zip(PROMPTS, RESPONSES)])  # one by one
    for label, column in {"positive": 1, "Positive": 1, "1": 1, "NEGATIVE": 0, "0": 0}.items():
        torch.testing.assert_close(scores_of(script, small, reward_label=label), logits[:, column], atol=1e-5, rtol=1e-5)
    other = swapped(tiny_classifier(), tmp_path / "swapped")
    for label in ("positive", "negative"):
        both = (scores_of(script, small, reward_label=label, reward_model_path=path) for path in (tiny_classifier(), other))
        torch.testing.assert_close(*both, atol=1e-6, rtol=1e-6)


def test_reward_model_with_another_tokenizer(ppo, script, small, tiny_lm, tiny_classifier):
    """Responses are decoded and tokenised again: the score is that of the text, whatever the ids are."""
    folder = tiny_classifier("other")
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    assert tokenizer("The film").input_ids != AutoTokenizer.from_pretrained(tiny_lm())("The film").input_ids
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(p + r, return_tensors="pt")).logits for p, r in zip(PROMPTS, RESPONSES)])
    torch.testing.assert_close(scores_of(script, small, reward_model_path=folder), logits[:, 1], atol=1e-5, rtol=1e-5)
    _, run, metrics = ppo(reward_model_path=folder, num_sample_generations=1)
    rows = rows_of(run, "samples.jsonl")
    with torch.no_grad():
        again = torch.cat([model(**tokenizer(row["prompt"] + row["response"], return_tensors="pt")).logits[:, 1] for row in rows])
    torch.testing.assert_close(torch.tensor([row["score"] for row in rows]), again, atol=1e-5, rtol=1e-5)


# ---- Pads ------------------------------------------------------------------------------------------------------------
def with_tokenizer(folder, target, change):
    """A copy of a model folder with its tokenizer changed. -> str"""
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    change(tokenizer)
    tokenizer.save_pretrained(target)
    return str(target)


def test_pad_is_eos(ppo, tiny_lm, tmp_path):
    """With pad = EOS every metric is what it is with a pad of its own, with early stops among the responses."""
    own = eos_prone(tiny_lm, tmp_path / "own")
    eos = with_tokenizer(own, tmp_path / "eos", lambda tokenizer: setattr(tokenizer, "pad_token", tokenizer.eos_token))
    assert AutoTokenizer.from_pretrained(eos).pad_token_id == AutoTokenizer.from_pretrained(eos).eos_token_id
    (_, _, one), (_, _, other) = (ppo(name, model_name_or_path=path) for name, path in (("run-own", own), ("run-eos", eos)))
    assert 0 < one[0]["val/num_eos_tokens"] < 8
    timed = ("eps", "perf")
    assert {k: v for k, v in one[0].items() if not k.startswith(timed)} == {k: v for k, v in other[0].items() if not k.startswith(timed)}


def test_pad_beyond_the_embedding(ppo, tiny_lm, tmp_path):
    """A [PAD] that was added to the tokenizer and has no row in the embedding changes nothing."""
    far = with_tokenizer(tiny_lm(), tmp_path / "far", lambda tokenizer: tokenizer.add_special_tokens(dict(pad_token="[PAD]")))
    assert AutoTokenizer.from_pretrained(far).pad_token_id == AutoModelForCausalLM.from_pretrained(far).config.vocab_size
    (_, _, one), (_, _, other) = (ppo(name, model_name_or_path=path) for name, path in (("run-own", tiny_lm()), ("run-far", far)))
    for name in ("objective/kl", "objective/scores", "loss/policy_avg", "loss/value_avg", "completions/mean_length"):
        assert one[0][name] == other[0][name]


# ---- Stops, penalties, clips -----------------------------------------------------------------------------------------
def watch(ppo, script, monkeypatch, folder, **changes):
    """One run -> (metrics of its first update, tokens, lengths and final scores of the first update, its KL and rewards)."""
    with monkeypatch.context() as patch:
        generated, rewarded, advantages = (spy(patch, script, name) for name in ("generate", "token_rewards", "gae"))
        _, _, metrics = ppo(folder, **changes)
    tokens, lengths = generated[1][1]  # the first is the held-out prompts
    (scores, kl, _, kl_coef), rewards = rewarded[0]
    return dict(metrics=metrics[0], tokens=tokens, lengths=lengths, scores=scores, kl=kl, kl_coef=kl_coef, rewards=rewards,
                used=advantages[0][0][0])  # fmt: skip


def test_missing_eos_penalty(ppo, script, tiny_lm, tmp_path, monkeypatch):
    """A response without EOS scores exactly the penalty less; the others stay as they are."""
    lm = eos_prone(tiny_lm, tmp_path / "lm")
    reward_fn, eos = reward_file(tmp_path, SCORE), AutoTokenizer.from_pretrained(lm).eos_token_id
    plain, punished = (
        watch(ppo, script, monkeypatch, f"run-{penalty}", model_name_or_path=lm, reward_fn=reward_fn, missing_eos_penalty=penalty)
        for penalty in (None, 10.0)
    )
    ended = plain["tokens"].gather(1, plain["lengths"][:, None] - 1).squeeze(1) == eos
    assert 0 < ended.sum() < 8 and plain["metrics"]["val/num_eos_tokens"] == ended.sum()
    assert torch.equal(plain["scores"] - punished["scores"], torch.where(ended, 0.0, 10.0))
    assert punished["metrics"]["objective/scores"] == pytest.approx(punished["scores"].mean().item())
    assert punished["metrics"]["env/reward_mean"] == plain["metrics"]["env/reward_mean"]
    assert plain["metrics"]["completions/clipped_ratio"] == pytest.approx(1 - ended.float().mean().item())


def test_custom_stop_token(ppo, script, tmp_path, monkeypatch):
    """A stop token by its id ends responses, which then count as ended: no penalty for them."""
    flags = dict(reward_fn=reward_file(tmp_path, SCORE), response_min_length=6, missing_eos_penalty=100.0)
    free = watch(ppo, script, monkeypatch, "run-free", stop_token=None, **flags)
    stop = free["tokens"][0, 2].item()
    own = watch(ppo, script, monkeypatch, "run-own", stop_token_id=stop, **flags)
    for old, new, length, score in zip(free["tokens"], own["tokens"], own["lengths"], own["scores"]):
        where = (old == stop).nonzero().flatten().tolist()
        assert length == (where[0] + 1 if where else 6)
        assert torch.equal(old[:length], new[:length]) and (score > -50) == bool(where)
    assert own["lengths"][0] <= 3 and (free["scores"] < -50).all()


def test_no_stop_token(ppo, script, tiny_lm, tmp_path, monkeypatch):
    """With --stop-token None responses go on behind an EOS, to the end of their room."""
    lm = eos_prone(tiny_lm, tmp_path / "lm")
    seen = watch(ppo, script, monkeypatch, "run", model_name_or_path=lm, stop_token=None, response_min_length=6)
    eos = AutoTokenizer.from_pretrained(lm).eos_token_id
    assert (seen["tokens"][:, :-1] == eos).any() and (seen["lengths"] == 6).all() and seen["metrics"]["val/num_eos_tokens"] == 0


def test_room_of_a_response_is_drawn(ppo, script, monkeypatch):
    """Lengths lie between response_min_length and response_length, and both ends occur."""
    seen = watch(ppo, script, monkeypatch, "run", stop_token=None, per_device_train_batch_size=16, total_episodes=32,
                 response_min_length=2, response_length=4, local_rollout_forward_batch_size=32)  # fmt: skip
    assert seen["lengths"].unique().tolist() == [2, 3, 4]
    row = seen["metrics"]
    assert (row["completions/min_length"], row["completions/max_length"]) == (2, 4)
    assert row["completions/mean_length"] == pytest.approx(seen["lengths"].float().mean().item())


def test_score_clip_comes_before_the_penalty(ppo, script, tmp_path, monkeypatch):
    """Scores are clipped to +-score_clip, and the penalty is not; the logged reward is what the function said."""
    flags = dict(reward_fn=reward_file(tmp_path, "return [10.0 * (-1) ** i for i in range(len(prompts))]"), stop_token=None)
    seen = watch(ppo, script, monkeypatch, "run", score_clip=1.5, missing_eos_penalty=2.0, **flags)
    assert seen["scores"].tolist() == [1.5 - 2, -1.5 - 2] * 4
    assert seen["metrics"]["env/reward_mean"] == 0 and seen["metrics"]["env/reward_std"] == 10


@pytest.mark.parametrize("on", [False, True])
def test_whiten_rewards(ppo, script, monkeypatch, on):
    """Rewards over the valid tokens get a standard deviation of 1 and keep their mean; without the flag they are used as they are."""
    seen = watch(ppo, script, monkeypatch, "run", whiten_rewards=on)
    valid = torch.arange(6) < seen["lengths"][:, None]
    raw, used = seen["rewards"][valid], seen["used"][valid]
    if on:
        assert used.std(correction=0).item() == pytest.approx(1, abs=1e-4) and raw.std(correction=0).item() != pytest.approx(1, abs=1e-2)
        assert used.mean().item() == pytest.approx(raw.mean().item(), abs=1e-6)
    else:
        assert torch.equal(raw, used)


# ---- KL --------------------------------------------------------------------------------------------------------------
def test_fixed_kl_coefficient(ppo):
    """Without kl_target the coefficient stays, whatever the KL."""
    _, _, rows = ppo(kl_target=None, kl_coef=0.3, total_episodes=24, learning_rate=0.05)
    assert [row["objective/kl_coef"] for row in rows] == [0.3] * 3 and rows[-1]["objective/kl"] > 0.01


def test_adaptive_kl_coefficient(ppo):
    """With kl_target it follows Ziegler's formula, from one update to the next."""
    _, _, rows = ppo(kl_target=0.5, kl_horizon=100, kl_coef=0.3, total_episodes=32, learning_rate=0.01)
    assert rows[0]["objective/kl_coef"] == 0.3
    for row, after in zip(rows, rows[1:]):
        error = min(max(row["objective/kl"] / 0.5 - 1, -0.2), 0.2)
        assert after["objective/kl_coef"] == pytest.approx(row["objective/kl_coef"] * (1 + error * 8 / 100), rel=1e-6)
    assert rows[1]["objective/kl_coef"] == pytest.approx(0.3 * (1 - 0.2 * 8 / 100))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_logged_kl_is_the_kl_of_the_reward(ppo, script, tmp_path, monkeypatch, estimator):
    """non_score_reward = -kl_coef * kl for each estimator, and both are what the rewards were made of."""
    calls = spy(monkeypatch, script, "token_rewards")
    _, _, rows = ppo(kl_estimator=estimator, kl_coef=0.3, total_episodes=16, learning_rate=0.05, reward_fn=reward_file(tmp_path, SCORE))
    for row, ((scores, kl, lengths, _), rewards) in zip(rows, calls):
        assert row["objective/non_score_reward"] == pytest.approx(-0.3 * row["objective/kl"], rel=2e-7, abs=1e-7)
        assert row["objective/scores"] == pytest.approx(scores.mean().item(), abs=1e-6)
        assert row["objective/rlhf_reward"] == pytest.approx(row["objective/scores"] + row["objective/non_score_reward"], abs=1e-6)
        assert row["objective/rlhf_reward"] == pytest.approx(rewards.sum(1).mean().item(), abs=1e-5)
        valid = torch.arange(kl.shape[1]) < lengths[:, None]
        assert row["objective/kl"] == pytest.approx(torch.where(valid, kl, 0).sum(1).mean().item(), abs=1e-6)
        assert estimator == "k1" or (kl[valid] >= 0).all()
    assert rows[0]["objective/kl"] == 0 and abs(rows[1]["objective/kl"]) > 1e-3


# ---- Steps -----------------------------------------------------------------------------------------------------------
def count_steps(monkeypatch):
    """A list that grows with every step of torch.optim.SGD."""
    steps, step = [], torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, *args, **kwargs: (steps.append(1), step(self, *args, **kwargs))[1])
    return steps


@pytest.mark.parametrize("minibatches, epochs, accumulation", [(1, 1, 1), (4, 3, 1), (2, 2, 2)])
def test_number_of_steps(ppo, monkeypatch, minibatches, epochs, accumulation):
    """num_mini_batches * num_ppo_epochs steps an update; accumulation adds none."""
    steps = count_steps(monkeypatch)
    sizes = dict(num_mini_batches=minibatches, num_ppo_epochs=epochs, gradient_accumulation_steps=accumulation)
    ppo(per_device_train_batch_size=2, total_episodes=2 * minibatches * accumulation, optimizer="torch.optim.SGD", **sizes)
    assert len(steps) == minibatches * epochs


def test_early_stop(ppo, monkeypatch):
    """A tiny early_stop_approxkl leaves an update after its first step, and not the run."""
    steps = count_steps(monkeypatch)
    _, _, rows = ppo(early_stop_approxkl=1e-12, total_episodes=16, num_ppo_epochs=3, optimizer="torch.optim.SGD", learning_rate=1.0)
    assert len(steps) == 2 and len(rows) == 2


def test_gradient_does_not_depend_on_micro_batches(ppo, tiny_lm):
    """One step of SGD on 8 episodes of unequal lengths: as 8, as 2 x 4 and as 8 x 1."""
    results = []
    for n, accumulation in ((8, 1), (4, 2), (1, 8)):
        sizes = dict(per_device_train_batch_size=n, gradient_accumulation_steps=accumulation, num_mini_batches=1, num_ppo_epochs=1)
        _, folder, rows = ppo(f"run{n}", optimizer="torch.optim.SGD", learning_rate=0.1, max_grad_norm=None, vf_coef=1.0, **sizes)
        results.append(weights(folder / "model") | load_file(folder / "model/value_head.safetensors"))
    assert rows[0]["completions/min_length"] < rows[0]["completions/max_length"]
    assert distance(results[0], results[1]) < 1e-6 and distance(results[0], results[2]) < 1e-6
    start = start_of(tiny_lm())
    assert max((results[0][name] - start[name]).abs().max() for name in start) > 1e-3


def test_max_grad_norm(ppo, tiny_lm):
    """The step of SGD is as long as lr * max_grad_norm where gradients are longer than that."""
    flags = dict(optimizer="torch.optim.SGD", learning_rate=1.0, num_mini_batches=1, num_ppo_epochs=1, per_device_train_batch_size=8)
    _, folder, _ = ppo(max_grad_norm=1e-2, **flags)
    after, start = weights(folder / "model"), start_of(tiny_lm())
    moved = sum((after[name] - start[name]).square().sum() for name in start)
    moved += sum(x.square().sum() for x in load_file(folder / "model/value_head.safetensors").values())
    assert moved.sqrt().item() == pytest.approx(1e-2, rel=1e-2)


def test_broken_gradients_are_skipped_and_stop_the_run(ppo, script, tiny_lm, monkeypatch, capsys):
    """A gradient that is not finite changes no weight; 5 in a row end the run in one line."""
    steps, original = count_steps(monkeypatch), script.clipped_policy_loss
    calls = []

    def sometimes(*args):
        calls.append(1)
        return original(*args) * (math.nan if len(calls) in broken else 1)

    monkeypatch.setattr(script, "clipped_policy_loss", sometimes)
    broken = {2}
    _, folder, rows = ppo("once", optimizer="torch.optim.SGD")
    assert len(steps) == 3 and "not finite" in capsys.readouterr().out
    assert all(torch.isfinite(x).all() for x in weights(folder / "model").values())
    broken = range(1000)
    with pytest.raises(script.UserError, match="not finite"):
        ppo("always", total_episodes=16, optimizer="torch.optim.SGD")


# ---- The run folder --------------------------------------------------------------------------------------------------
def test_run_folder(ppo, script, tiny_lm):
    """What stands in a run folder, and that the table's numbers are in evaluation.json."""
    import json

    _, folder, metrics = ppo(total_episodes=16)
    names = {path.name for path in folder.iterdir()}
    assert {"args.json", "metrics.jsonl", "samples.jsonl", "evaluation.json", "curves.png", "model", "checkpoints"} <= names
    about = json.loads((folder / "args.json").read_text())
    assert script.Args(**about["args"]).total_episodes == 16 and about["world_size"] == 1 and "torch" in about["versions"]
    table = json.loads((folder / "evaluation.json").read_text())
    assert table["before"].keys() == table["after"].keys() and table["n"] == 4 and table["before"]["KL, nats a response"] == 0
    assert table["before"] != table["after"] and "temperature" in table["decoding"] and table["judge"]
    assert [row["episode"] for row in metrics] == [8, 16]
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_old_checkpoints_go(ppo):
    """keep_checkpoints newest ones stay; the last update is always saved."""
    _, folder, _ = ppo(total_episodes=40, save_every=1, keep_checkpoints=2, num_ppo_epochs=1)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["000004", "000005"]


def test_tensorboard(ppo):
    """The event file has the metrics under train/."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, folder, rows = ppo(log_with="tensorboard", total_episodes=16)
    file = next(folder.rglob("events.out.tfevents.*"))
    events = EventAccumulator(str(file.parent)).Reload()
    points = events.Scalars("train/objective/kl")
    assert [point.step for point in points] == [1, 2]
    assert [point.value for point in points] == pytest.approx([row["objective/kl"] for row in rows], rel=1e-5)


def test_wandb_offline(ppo, tmp_path, monkeypatch):
    """WANDB_MODE=offline needs no network and leaves a run folder."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    ppo(log_with="wandb")
    assert list(tmp_path.rglob("offline-run-*/*.wandb"))
