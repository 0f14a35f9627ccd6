"""Bug reports that were filed against other projects, tried here.

A run is right, or it is refused in one line before training. It never goes on with other weights, prompts or
rewards than those that the user gave.
"""

import json
import shutil
import sys
from pathlib import Path

import accelerate
import numpy
import peft
import pytest
import torch
import transformers
from conftest import GROUPS, RL
from run_tools import reward_file, rows_of, weights
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

pytest_plugins = ["run_fixtures"]
CPU = torch.device("cpu")
Accelerator = accelerate.Accelerator
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def script(scripts):
    """ppo_sentiment.py as a module."""
    return scripts["ppo_sentiment"]


@pytest.fixture
def copy_of(tmp_path):
    """copy_of(folder) -> a copy that a test may damage."""

    def copy(folder):
        return Path(shutil.copytree(folder, tmp_path / "copy"))

    return copy


# ---- What is certain to fail at the end is found at the start ----------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        *(dict(min_p=0.1), dict(typical_p=0.5), dict(epsilon_cutoff=0.1), dict(temperature=2.0)),
        *(dict(pad_token_id=-1), dict(stop_strings=["###"]), dict(return_dict_in_generate=True)),
    ],
)
def test_a_generation_config_that_cannot_be_saved_or_used(sft, tiny_lm, copy_of, setting):
    """transformers#29988: settings of sampling without do_sample; and others that would stop the samples at
    the end. Stop tokens stay, the model is saved."""
    folder = copy_of(tiny_lm())
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | setting))
    _, run_folder, _ = sft(model_name_or_path=str(folder))
    saved = transformers.GenerationConfig.from_pretrained(run_folder / "model")
    assert saved.eos_token_id == config["eos_token_id"]


@pytest.mark.parametrize("lora_r", [0, 2])
def test_samples_do_not_use_the_settings_of_the_model(scripts, tiny_lm, lora_r):
    """They are drawn from the model's own distribution. Afterwards the settings are back."""
    script, tokenizer = scripts["sft"], AutoTokenizer.from_pretrained(tiny_lm())
    samples = []
    for settings in ({}, dict(do_sample=True, temperature=0.01, repetition_penalty=9.0)):
        model = AutoModelForCausalLM.from_pretrained(tiny_lm())
        own = model.generation_config = transformers.GenerationConfig(**settings)
        wrapped = model
        if lora_r:
            wrapped = script.add_lora(model, script.Args(lora_r=lora_r))
        torch.manual_seed(0)
        samples += script.write_samples(wrapped, tokenizer, [([5, 6, 7], [-100, -100, 7])], [1])
        assert model.generation_config is own
    assert samples[0] == samples[1]


def test_optimizers_that_cannot_train(script):
    """oumi#308: Muon trains nothing but matrices."""
    parameters = [torch.nn.Parameter(torch.zeros(3, 4)), torch.nn.Parameter(torch.zeros(4))]
    with pytest.raises(script.UserError, match="--optimizer torch.optim.Muon.*does not work here"):
        script.make_optimizer(script.Args(optimizer="torch.optim.Muon"), parameters)
    with pytest.raises(script.UserError, match="--optimizer torch.optim.LBFGS.*does not work here.*closure"):
        script.make_optimizer(script.Args(optimizer="torch.optim.LBFGS"), parameters)
    assert script.make_optimizer(script.Args(optimizer="torch.optim.Adafactor"), parameters)


@pytest.mark.parametrize("name", RL)
def test_quantized_weights_are_not_trained(scripts, small, monkeypatch, name):
    """peft#2501: without LoRA, only the weights that are not quantized would be trained."""
    script, load_model = scripts[name], scripts[name].load_model

    def load_quantized(*inputs, **options):
        model = load_model(*inputs, **options)
        model.codes = torch.nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
        return model

    monkeypatch.setattr(script, "load_model", load_quantized)
    with pytest.raises(script.UserError, match="--lora-r"):
        script.train(small(name))


@pytest.mark.parametrize("number, factor", [(0, 0), (0, None), (-1, None)])
def test_a_layer_without_a_gradient(script, tiny_lm, monkeypatch, number, factor):
    """bitsandbytes may pass no gradient through 4-bit weights: 0, or nothing for some or all weights."""
    model = AutoModelForCausalLM.from_pretrained(tiny_lm())
    block = model.transformer.h[number]
    forward = block.forward
    args = script.Args(lora_r=2, lora_target_modules="c_attn, c_fc")
    script.check_gradients(script.add_lora(AutoModelForCausalLM.from_pretrained(tiny_lm()), args))

    def blocked(*inputs, **options):
        output = forward(*inputs, **options)
        return output.detach() if factor is None else output.detach() + factor * output

    monkeypatch.setattr(block, "forward", blocked)
    with pytest.raises(script.UserError, match="no gradient"):
        script.check_gradients(script.add_lora(model, args))


@pytest.mark.parametrize("name, folder", [("sft", "tiny_lm"), ("reward_model", "tiny_classifier")])
def test_quantized_weights_are_refused(scripts, small, request, monkeypatch, name, folder):
    """sft.py and reward_model.py could not merge the adapter at the end."""
    script, load_model = scripts[name], scripts[name].load_model

    def load_quantized(*inputs, **options):
        model = load_model(*inputs, **options)
        model.is_quantized = True
        return model

    monkeypatch.setattr(script, "load_model", load_quantized)
    path = request.getfixturevalue(folder)()
    with pytest.raises(script.UserError, match="quantized weights cannot be trained here"):
        script.train(small(name, model_name_or_path=str(path), lora_r=2, lora_target_modules="all-linear"))


def test_a_layer_that_is_not_used(scripts):
    """BERT's pooler gets an adapter with all-linear, but the last hidden states do not depend on it."""
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    script = scripts["reward_model"]
    model = script.add_lora(transformers.BertModel(config), script.Args(lora_r=2))
    assert any("pooler" in name for name in model.targeted_module_names)


# ---- Nothing that a file lacks is made up ------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model."])
def test_keys_with_a_prefix(script, tiny_lm, copy_of, prefix):
    """transformers#46620: a compiled or wrapped model was saved; none of its weights is found."""
    folder = copy_of(tiny_lm())
    tensors = {prefix + name: x for name, x in weights(folder).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(script.UserError, match="weights are not in the files"):
        script.load_model(AutoModelForCausalLM, str(folder))


def test_a_reward_model_without_its_score(scripts, tiny_preference_model, tiny_lm, copy_of, capsys):
    """OpenRLHF#209: the reward would be random. A base model gets a new head, and says so."""
    rloo = scripts["rloo_tldr"]
    folder = copy_of(tiny_preference_model())
    tensors = weights(folder)
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(rloo.UserError, match="score.weight"):
        rloo.load_reward_model(rloo.Args(), str(folder), CPU)
    rloo.load_reward_model(rloo.Args(), tiny_lm(), CPU)
    assert "random reward head" in capsys.readouterr().out


def test_adapters(script, tiny_lm, tmp_path):
    """peft#2415: no name of the base, missing weights, another size. A whole adapter is merged."""
    base = AutoModelForCausalLM.from_pretrained(tiny_lm())
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)
    folder = tmp_path / "adapter"
    peft.get_peft_model(base, config).save_pretrained(folder)
    merged = script.load_model(AutoModelForCausalLM, str(folder))
    difference = (
        merged.transformer.h[0].attn.c_attn.weight - weights(tiny_lm())["transformer.h.0.attn.c_attn.weight"]
    )
    assert difference.abs().max() > 0.01 and all(p.requires_grad for p in merged.parameters())

    tensors = load_file(folder / "adapter_model.safetensors")
    name = max(tensors)
    save_file({key: x for key, x in tensors.items() if key != name}, folder / "adapter_model.safetensors")
    with pytest.raises(script.UserError, match="missing adapter keys"):
        script.load_model(AutoModelForCausalLM, str(folder))
    save_file(tensors | {name: torch.zeros(7, 2)}, folder / "adapter_model.safetensors")
    with pytest.raises(script.UserError, match="size mismatch"):
        script.load_model(AutoModelForCausalLM, str(folder))
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": None}))
    with pytest.raises(script.UserError, match="cannot load None"):
        script.load_model(AutoModelForCausalLM, str(folder))

    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "prompts")
    with pytest.raises(script.UserError, match="cannot load .*prompts"):
        script.load_model(AutoModelForCausalLM, str(tmp_path / "prompts"))


@pytest.mark.parametrize("names", ["c_attn,c_porj", "c_attn,", "c_attn,_fc"])
def test_names_of_lora_layers(script, tiny_lm, names):
    """peft#1959: each name must be that of a layer; spaces do not matter."""
    model = AutoModelForCausalLM.from_pretrained(tiny_lm())
    with pytest.raises(script.UserError, match="no layer is called"):
        script.add_lora(model, script.Args(lora_r=2, lora_target_modules=names))
    model = script.add_lora(
        AutoModelForCausalLM.from_pretrained(tiny_lm()),
        script.Args(lora_r=2, lora_target_modules="c_attn, c_fc"),
    )
    assert {name.split(".")[-1] for name in model.targeted_module_names} == {"c_attn", "c_fc"}


# ---- Architectures are measured ----------------------------------------------------------------------------


def test_a_cache_that_cannot_drop_rows(script):
    """transformers#48305: Mamba's state is not a list of tokens."""
    config = transformers.MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, state_size=2)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(script.UserError, match="no row can leave its cache"):
        script.check_model(model, "mamba", 10)


@pytest.mark.parametrize("name", ["reward_model", "ppo_sentiment"])
def test_a_classifier_that_reads_padding(scripts, tiny_lm, name):
    """XLNet reads its last position, which is a pad in a batch. Others do not care."""
    script, tokenizer = scripts[name], AutoTokenizer.from_pretrained(tiny_lm())
    sizes = dict(vocab_size=1100, d_model=16, n_layer=1, n_head=2, d_inner=16, initializer_range=0.5)
    config = transformers.XLNetConfig(**sizes)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    with pytest.raises(script.UserError, match="padding changes its logits"):
        script.check_classifier(model, tokenizer, "xlnet", 20)
    sizes = dict(vocab_size=1100, dim=16, n_layers=1, n_heads=2, hidden_dim=16, initializer_range=0.5)
    model = AutoModelForSequenceClassification.from_config(transformers.DistilBertConfig(**sizes)).eval()
    script.check_classifier(model, tokenizer, "distilbert", 20)
    with pytest.raises(script.UserError, match="distilbert cannot read 600 tokens"):
        script.check_classifier(model, tokenizer, "distilbert", 600)


def test_a_critic_that_cannot_read_left_padding(script):
    """T5 has a decoder, and RWKV does not know of padding."""
    sizes = dict(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    t5 = transformers.AutoModel.from_config(transformers.T5Config(**sizes))
    sizes = dict(vocab_size=16, hidden_size=8, num_hidden_layers=2, attention_hidden_size=8)
    rwkv = transformers.AutoModel.from_config(transformers.RwkvConfig(**sizes)).eval()
    for critic in (t5, rwkv):
        with pytest.raises(script.UserError, match="cannot read left-padded rows"):
            script.check_critic(critic, "critic", 16, 10)


def test_the_context_of_a_nested_config(script):
    """trl#5032: Gemma 3 keeps the size of its text model in a config of its own."""
    config = transformers.Gemma3Config(text_config=dict(max_position_embeddings=123))
    assert script.context_length(config) == 123
    assert script.context_length(transformers.BloomConfig()) == 1_000_000


# ---- Functions and modules of users ------------------------------------------------------------------------


@pytest.mark.parametrize("name", RL)
def test_a_function_may_change_its_inputs(scripts, name):
    """trl#6364: neither another function, nor another response, nor the data set sees it."""
    script = scripts[name]
    nums = [1, 2]  # the same list in both rows, as for two responses to one prompt
    rows = [{"nums": nums}, {"nums": nums}]

    def cross_off(completions, nums, **kwargs):
        for text, left in zip(completions, nums):
            text.append("seen")
            left.remove(1)
        return [len(left) for left in nums]

    inputs = dict(prompts=["a", "b"], completions=[["x"], ["y"]], completion_ids=[[3], [4]])
    functions = {"first": cross_off, "second": cross_off}
    rewards = script.call_reward_functions(functions, rows, inputs, None, CPU)
    assert rewards["first"].tolist() == rewards["second"].tolist() == [1, 1]
    assert nums == [1, 2] and inputs["completions"] == [["x"], ["y"]]


def test_a_function_that_exits(scripts, small, tmp_path, capsys):
    """CodeRL#26: the run does not end as if it were complete."""
    args = small("grpo_math", reward_fn=reward_file(tmp_path, "import sys\nsys.exit(0)", "leaving"))
    with pytest.raises(SystemExit) as end:
        scripts["grpo_math"].run_command_line(scripts["grpo_math"].train, args)
    assert end.value.code == 2 and "failed: SystemExit(0)" in capsys.readouterr().err


def test_a_file_that_switches_gradients_off(script, tmp_path):
    """In the file, or in the function: the training goes on with gradients."""
    body = "torch.set_grad_enabled(False)\nreturn [1.0] * len(prompts)"
    [name] = reward_file(tmp_path, body, "no_gradients")
    path = tmp_path / "no_gradients.py"
    path.write_text("import torch\ntorch.set_grad_enabled(False)\n" + path.read_text())
    functions = script.load_functions("--reward-fn", [name])
    assert torch.is_grad_enabled()
    inputs = dict(prompts=["a"], completions=["b"], completion_ids=[[1]])
    script.call_reward_functions(functions, [{}], inputs, None, CPU)
    assert torch.is_grad_enabled()


def test_a_timeout_that_is_no_exception(script):
    """func_timeout raises a BaseException."""

    def slow(**columns):
        raise type("FunctionTimedOut", (BaseException,), {})

    inputs = dict(prompts=["a"], completions=["b"], completion_ids=[[1]])
    with pytest.raises(script.UserError, match="reward slow failed: FunctionTimedOut"):
        script.call_reward_functions({"slow": slow}, [{}], inputs, None, CPU)


def test_a_file_behind_a_link(script, tmp_path):
    """The Hub's cache links a file's name to its hash."""
    body = "return [1.0] * len(prompts)"
    reward_file(tmp_path, body, "3f2a9c")
    (tmp_path / "linked_reward.py").symlink_to(tmp_path / "3f2a9c.py")
    assert script.load_functions("--reward-fn", [f"{tmp_path}/linked_reward.py:reward"])


def test_a_worker_stops_at_a_signal(ppo, tmp_path):
    """The handler that finishes an update is that of the run, not of the processes that a function forks.

    The end of a multiprocessing.Pool sends SIGTERM, and waits. A handler in Python would not be called in a
    worker that has just begun to wait for a lock.
    """
    body = """import signal, time
ready, started = os.pipe()
worker = os.fork()
if worker == 0:
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    os.write(started, b"1" if is_default else b"0")
    time.sleep(5)
    os._exit(0)
is_default = os.read(ready, 1) == b"1"
os.kill(worker, signal.SIGTERM)
_, status = os.waitpid(worker, 0)
return [float(is_default and os.WIFSIGNALED(status))] * len(prompts)"""
    _, _, rows = ppo(reward_fn=reward_file(tmp_path, body, "forking"))
    assert [row["env/reward_mean"] for row in rows] == [1.0] * len(rows)


def test_stop_tokens_are_no_text(ppo, tiny_lm, copy_of):
    """A chat model has several, and the reward reads none of them. Here they are ordinary letters."""
    folder = copy_of(tiny_lm())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    letters = tokenizer(list("bcdefghklmpqrsuvwxyz"), add_special_tokens=False).input_ids
    stop_ids = [ids[0] for ids in letters] + [tokenizer.eos_token_id]
    config = json.loads((folder / "generation_config.json").read_text())
    config["eos_token_id"] = stop_ids
    (folder / "generation_config.json").write_text(json.dumps(config))
    _, run_folder, _ = ppo(model_name_or_path=str(folder), num_sample_generations=9, response_length=16)
    rows = [row for row in rows_of(run_folder, "tokens.jsonl") if row["ids"][-1] in stop_ids[:-1]]
    assert rows
    for row in rows:
        assert not row["response"].endswith(tokenizer.decode(row["ids"][-1:]))


def test_processes_that_accelerate_does_not_connect(script, monkeypatch):
    """torchrun on a machine on which accelerate knows no way to connect them: runs of their own."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(accelerate, "Accelerator", lambda **options: Accelerator(**options | {"cpu": False}))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(script.UserError, match="1 of 2 processes"):
        script.start_accelerator(script.Args())
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_column_with_the_name_of_an_input(script):
    """Neither of the two may silently replace the other."""
    inputs = dict(prompts=["a"], completions=["b"], completion_ids=[[1]])
    with pytest.raises(script.UserError, match="rename the column completions"):
        script.call_reward_functions({"f": len}, [{"completions": "c"}], inputs, None, CPU)


def test_the_generator_of_numpy(script):
    """ms-swift#9935: the draws of an update do not depend on what came before it."""
    draws = []
    for before in (3, 5):
        numpy.random.rand(before)
        script.set_global_seed(1, 7)
        draws.append(numpy.random.rand())
    assert draws[0] == draws[1]


@pytest.mark.parametrize("name", RL)
def test_each_process_has_random_numbers_of_its_own(scripts, small, monkeypatch, name):
    """For reward functions; in the evaluation, all processes draw the same."""
    module, calls, real = scripts[name], [], scripts[name].set_global_seed

    def record(*purpose):
        calls.append(purpose)
        return real(*purpose)

    monkeypatch.setattr(module, "set_global_seed", record)
    monkeypatch.setattr(Accelerator, "process_index", 7)
    monkeypatch.setattr(module, "local_share", lambda x, accelerator: x)  # there is no process 7
    args = small(name)
    module.train(args)
    assert (args.seed, 1, 7) in calls and (args.seed, 1) not in calls
    assert calls[0][:2] == calls[-1][:2] == (args.seed, "held-out")


def test_a_function_that_changes_the_directory(ppo, tmp_path, monkeypatch):
    """The run stays in its folder."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    body = "os.chdir('elsewhere') if os.path.exists('elsewhere') else None\nreturn [1.0] * len(prompts)"
    ppo(output_dir="run", reward_fn=reward_file(tmp_path, body, "moving"))
    assert rows_of(tmp_path / "run") and (tmp_path / "run/model/model.safetensors").exists()


# ---- What the model is trained on is what the user gave ----------------------------------------------------


@pytest.mark.parametrize("name", GROUPS)
def test_the_beginning_of_an_answer_is_continued(scripts, tiny_lm, name):
    """transformers#33198: no closed turn, and no second header."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    tokenizer.chat_template = CHATML
    messages = [dict(role="user", content="2 + 3?"), dict(role="assistant", content="It is")]
    text = scripts[name].render_chat(tokenizer, messages, "2026-01-02", is_prompt=True)
    assert text == "<|user|>2 + 3?<|end|><|assistant|>It is"
    text = scripts[name].render_chat(tokenizer, messages[:1], "2026-01-02", is_prompt=True)
    assert text == "<|user|>2 + 3?<|end|><|assistant|>"


@pytest.mark.parametrize("quote", ["'", '"'])
@pytest.mark.parametrize("name", ["sft", "reward_model", *GROUPS])
def test_a_template_that_writes_the_date(scripts, tiny_lm, name, quote):
    """sglang#3296: another day would be another prompt, also when a run is resumed."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    tokenizer.chat_template = f"{{{{ strftime_now({quote}%d %B %Y{quote}) }}}}" + CHATML
    messages = [dict(role="user", content="Hi")]
    assert scripts[name].render_chat(tokenizer, messages, "2020-02-03").startswith("03 February 2020<|user|>")


def test_a_text_that_ends_with_eos(scripts, tiny_lm):
    """Many notebooks add EOS to the data. It is not added again."""
    sft, reward_model = scripts["sft"], scripts["reward_model"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    eos, ids = tokenizer.eos_token, tokenizer(" good").input_ids
    expected = [*ids, tokenizer.eos_token_id]
    rows = {"text": [" good", f" good{eos}"]}
    assert sft.text_documents(rows, tokenizer, sft.Args()) == [(expected, expected)] * 2
    rows = {"prompt": [" good"] * 2, "completion": [" good", f" good{eos}"]}
    for document, labels in sft.completion_documents(rows, tokenizer, sft.Args()):
        assert document == ids + expected and labels == [-100] * len(ids) + expected
    responses = [" good", f" good{eos}"]
    texts = reward_model.preference_ids(tokenizer, [" good"] * 2, responses, 99, "2026-01-02")
    assert texts == [ids + expected] * 2


def test_a_template_of_an_empty_column(scripts, tiny_lm):
    """A row without a question is no task about "None"."""
    script, tokenizer = scripts["grpo_math"], AutoTokenizer.from_pretrained(tiny_lm())
    args = script.Args(prompt_template="Solve {question}!", system_prompt=None, max_prompt_length=90)
    rows = [dict(question=x, answer=y) for x, y in (("2 + 3", None), (None, "5"), ("", "5"))]
    tasks = script.load_tasks(rows, tokenizer, args, "data")
    assert [task["prompt"] for task in tasks] == ["Solve 2 + 3!"]
    assert tasks[0]["columns"]["answer"] is None


def test_a_prompt_beside_chats(scripts, tiny_lm):
    """If chosen and rejected hold only the answers, the column prompt is the user's message."""
    script, tokenizer = scripts["reward_model"], AutoTokenizer.from_pretrained(tiny_lm())
    tokenizer.chat_template = CHATML
    user, good, bad = [
        dict(role=x, content=y) for x, y in (("user", "Hi"), *[("assistant", z) for z in "ab"])
    ]
    pairs = [
        dict(prompt="Hi", chosen=[good], rejected=[bad]),
        dict(prompt="Hi", chosen=[user, good], rejected=[user, bad]),
    ]
    data = script.datasets.Dataset.from_list(pairs)
    first, second = script.load_preference_rows(data, tokenizer, script.Args(max_length=200))
    assert first.texts == second.texts
    assert tokenizer.decode(first.texts[0]) == "<|user|>Hi<|end|><|assistant|>a<|end|>"


def test_values_of_a_file(scripts, tmp_path):
    """No 1 becomes 1.0, and no text a date; a list in a json file is as good as lines."""
    rows = [
        dict(x=72, y="2024-01-15", z=[1]),
        dict(x=3.5, y=None, z=[2.5, "7"]),
        dict(x="7", y='{"a": 1}', w={"a": "true"}),
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "test.json").write_text(json.dumps(rows, indent=1))
    for split in scripts["sft"].read_splits(str(tmp_path)).values():
        read = [{name: x for name, x in row.items() if x is not None} for row in split]
        assert repr(read) == repr([{name: x for name, x in row.items() if x is not None} for row in rows])


@pytest.mark.parametrize("name", ["ppo_sentiment", *GROUPS])
def test_special_tokens_of_the_text(scripts, tiny_lm, name):
    """trl#2897: a reward that looks for <answer> must see it. BOS, EOS and pad are no text."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>"]})
    response = tokenizer("<answer>5").input_ids + [tokenizer.eos_token_id]
    prompts, responses = scripts[name].decode(tokenizer, [tokenizer("2 + 3").input_ids], [response])
    assert prompts == ["2 + 3"] and responses == ["<answer>5"]


def test_a_label_that_is_called_by_a_number(script, tiny_classifier, tmp_path):
    """The label "1" of ratings from 1 to 2 is not label number 1."""
    args = script.Args(reward_label="1")
    model = AutoModelForSequenceClassification.from_pretrained(tiny_classifier())
    model.config.id2label = {0: "1", 1: "2"}
    model.config.label2id = {"1": 0, "2": 1}
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_classifier()).save_pretrained(tmp_path)
    logits, _ = script.load_label_scorer(args, str(tmp_path), CPU)(["a"], [" good film"])
    classify, _ = script.load_classifier(args, str(tmp_path), CPU)
    assert logits.item() == classify(["a good film"])[0, 0].item()


def test_a_terminal_that_knows_ascii_only(script, monkeypatch, tmp_path):
    """A response may hold any character."""
    with open(tmp_path / "out", "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        script.run_command_line(print, "caf\N{LATIN SMALL LETTER E WITH ACUTE}")
    assert (tmp_path / "out").read_text() == "caf?\n"
