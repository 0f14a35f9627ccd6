"""Bug reports that were filed against other projects, tried here.

A run is right, or it is refused before training. It never goes on with other weights, prompts or rewards than
those that the user gave.
"""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import accelerate
import numpy
import peft
import pytest
import torch
import transformers
from conftest import GROUPS, RL
from run_tools import flags_of, reward_file, rows_of, weights
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


# ---- Settings of the model ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        *(dict(min_p=0.1), dict(temperature=2.0), dict(pad_token_id=-1)),
        *(dict(stop_strings=["###"]), dict(return_dict_in_generate=True)),
    ],
)
def test_a_generation_config_that_cannot_be_saved_or_used(scripts, small, tiny_lm, copy_of, setting):
    """transformers#29988: settings of sampling without do_sample; and others that would stop the samples at
    the end. Stop tokens stay, the model is saved."""
    folder = copy_of(tiny_lm())
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | setting))
    for name in ("sft", "ppo_sentiment"):
        _, run_folder = scripts[name].train(small(name, name, model_name_or_path=str(folder)))
        saved = transformers.GenerationConfig.from_pretrained(run_folder / "model")
        assert saved.eos_token_id in (config["eos_token_id"], [config["eos_token_id"]])


def test_samples_do_not_use_the_settings_of_the_model(scripts, tiny_lm):
    """They are drawn from the model's own distribution."""
    script, tokenizer = scripts["sft"], AutoTokenizer.from_pretrained(tiny_lm())
    samples = []
    for settings in ({}, dict(do_sample=True, temperature=0.01, repetition_penalty=9.0)):
        model = AutoModelForCausalLM.from_pretrained(tiny_lm())
        stop_ids = [tokenizer.eos_token_id]
        model.generation_config = transformers.GenerationConfig(eos_token_id=stop_ids, **settings)
        torch.manual_seed(0)
        samples += script.write_samples(model, tokenizer, [([5, 6, 7], [-100, -100, 7])])
    assert samples[0] == samples[1]


@pytest.mark.parametrize("name", ["sft", "reward_model", *RL])
def test_quantized_weights_are_not_trained(scripts, small, monkeypatch, name):
    """peft#2501: without LoRA, only the weights that are not quantized would be trained."""
    script, load_model = scripts[name], scripts[name].load_model

    def load_quantized(*inputs, **options):
        model = load_model(*inputs, **options)
        model.codes = torch.nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
        model.is_quantized = True
        return model

    monkeypatch.setattr(script, "load_model", load_quantized)
    with pytest.raises(script.UserError, match="quantized weights cannot be trained"):
        script.train(small(name))


# ---- Nothing that a file lacks is made up ------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model."])
def test_keys_with_a_prefix(script, tiny_lm, copy_of, prefix):
    """transformers#46620: a compiled or wrapped model was saved; none of its weights is found."""
    folder = copy_of(tiny_lm())
    tensors = {prefix + name: x for name, x in weights(folder).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(script.UserError, match="weights are missing from the checkpoint"):
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


def test_adapters(script, small, tiny_lm, tmp_path):
    """peft#2415: missing weights, another size. A whole adapter is merged."""
    base = AutoModelForCausalLM.from_pretrained(tiny_lm())
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)
    folder = tmp_path / "adapter"
    peft.get_peft_model(base, config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_lm()).save_pretrained(folder)
    merged = script.load_model(AutoModelForCausalLM, str(folder))
    name = "transformer.h.0.attn.c_attn.weight"
    assert (merged.get_parameter(name) - weights(tiny_lm())[name]).abs().max() > 0.01
    assert all(p.requires_grad for p in merged.parameters())

    tensors = load_file(folder / "adapter_model.safetensors")
    name = max(tensors)
    args = small("ppo_sentiment", model_name_or_path=str(folder))
    for damaged, error in (
        ({key: x for key, x in tensors.items() if key != name}, "missing adapter keys"),
        (tensors | {name: torch.zeros(7, 2)}, "size mismatch"),
    ):
        save_file(damaged, folder / "adapter_model.safetensors")
        with pytest.raises(Exception, match=error):
            script.main(flags_of(args))


@pytest.mark.parametrize("names", ["c_attn,c_porj", "c_attn,", "c_attn,_fc"])
def test_names_of_lora_layers(script, tiny_lm, names):
    """peft#1959: each name must be that of a layer; spaces do not matter."""
    model = AutoModelForCausalLM.from_pretrained(tiny_lm())
    with pytest.raises(script.UserError, match="only {'c_attn'} are names of layers"):
        script.add_lora(model, script.Args(lora_r=2, lora_target_modules=names))
    model = script.add_lora(
        AutoModelForCausalLM.from_pretrained(tiny_lm()),
        script.Args(lora_r=2, lora_target_modules="c_attn, c_fc"),
    )
    assert {name.split(".")[-1] for name in model.targeted_module_names} == {"c_attn", "c_fc"}


def test_a_classifier_that_reads_padding(scripts, tiny_lm, tmp_path):
    """XLNet reads its last position, which is a pad in a batch."""
    sizes = dict(vocab_size=1100, d_model=16, n_layer=1, n_head=2, d_inner=16, num_labels=1)
    AutoModelForSequenceClassification.from_config(transformers.XLNetConfig(**sizes)).save_pretrained(
        tmp_path
    )
    AutoTokenizer.from_pretrained(tiny_lm()).save_pretrained(tmp_path)
    ppo, rloo = scripts["ppo_sentiment"], scripts["rloo_tldr"]
    for module, load in ((ppo, ppo.load_classifier), (rloo, rloo.load_reward_model)):
        with pytest.raises(module.UserError, match="may be padding"):
            load(module.Args(), str(tmp_path), CPU)


def test_a_critic_that_cannot_read_left_padding(script):
    """RWKV does not know of padding."""
    sizes = dict(vocab_size=16, hidden_size=8, num_hidden_layers=2, attention_hidden_size=8)
    rwkv = transformers.AutoModel.from_config(transformers.RwkvConfig(**sizes)).eval()
    with pytest.raises(script.UserError, match="cannot read left-padded rows"):
        script.check_critic(rwkv, "critic")


def test_the_context_of_a_nested_config(script):
    """trl#5032: Gemma 3 keeps the size of its text model in a config of its own."""
    config = transformers.Gemma3Config(text_config=dict(max_position_embeddings=123))
    assert script.context_length(config) == 123
    assert script.context_length(transformers.BloomConfig()) == 1_000_000


# ---- Functions and modules of users ------------------------------------------------------------------------


def test_a_function_may_change_its_inputs(script):
    """trl#6364: neither another function, nor another response, nor the data set sees it."""
    nums = [1, 2]  # the same list in both rows, as for two responses to one prompt
    rows = [{"nums": nums}, {"nums": nums}]
    completions = [["x"], ["y"]]

    def cross_off(completions, nums, **kwargs):
        for text, left in zip(completions, nums):
            text.append("seen")
            left.remove(1)
        return [len(left) for left in nums]

    functions = {"first": cross_off, "second": cross_off}
    rewards = script.call_reward_functions(functions, None, CPU, rows, ["a", "b"], completions, [[3], [4]])
    assert rewards["first"].tolist() == rewards["second"].tolist() == [1, 1]
    assert nums == [1, 2] and completions == [["x"], ["y"]]


def test_a_file_behind_a_link(script, tmp_path):
    """The Hub's cache links a file's name to its hash."""
    reward_file(tmp_path, "return [1.0] * len(prompts)", "3f2a9c")
    (tmp_path / "linked_reward.py").symlink_to(tmp_path / "3f2a9c.py")
    assert script.load_functions([f"{tmp_path}/linked_reward.py:reward"])


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
    with pytest.raises(script.UserError, match="connects no processes here"):
        script.start_accelerator(script.Args())
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


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
    """For reward functions."""
    module, calls, real = scripts[name], [], scripts[name].set_global_seed

    def record(*purpose):
        calls.append(purpose)
        return real(*purpose)

    @contextmanager
    def everything(accelerator, inputs):  # there is no process 7
        yield inputs

    monkeypatch.setattr(module, "set_global_seed", record)
    monkeypatch.setattr(Accelerator, "process_index", 7)
    monkeypatch.setattr(Accelerator, "split_between_processes", everything)
    args = small(name)
    module.train(args)
    assert (args.seed, 1, 7) in calls and (args.seed, 1) not in calls


def test_a_function_that_changes_the_directory(ppo, tmp_path, monkeypatch):
    """The run stays in its folder."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    body = "os.chdir('elsewhere') if os.path.exists('elsewhere') else None\nreturn [1.0] * len(prompts)"
    ppo(output_dir="run", reward_fn=reward_file(tmp_path, body, "moving"))
    assert rows_of(tmp_path / "run") and (tmp_path / "run/model/model.safetensors").exists()


# ---- Resuming ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [["--adam-eps", "0.5"], ["--optimizer", "torch.optim.AdamW"]])
def test_a_flag_of_the_optimizer_is_refused_on_resume(script, small, flags):
    """torch's load_state_dict restores the settings of the checkpoint, so it would have no effect."""
    args = small("ppo_sentiment")
    script.train(args)
    with pytest.raises(script.UserError, match=f"cannot change {flags[0]}"):
        script.parse_args(["--resume", args.output_dir, *flags])


def test_weights_of_another_shape_are_not_loaded(script, small):
    """[1, H] would be copied into both rows of [2, H]."""
    sgd = dict(optimizer="torch.optim.SGD", lora_target_modules="c_attn")
    args = small("ppo_sentiment", lora_r=1, **sgd)
    script.train(args)
    with pytest.raises(script.UserError, match="the checkpoint holds other weights"):
        script.train(script.parse_args(["--resume", args.output_dir, "--lora-r", "2"]))


# ---- What the model is trained on is what the user gave ----------------------------------------------------


@pytest.mark.parametrize("name", GROUPS)
def test_the_beginning_of_an_answer_is_continued(scripts, tiny_lm, name):
    """transformers#33198: no closed turn, and no second header."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    tokenizer.chat_template = CHATML
    messages = [dict(role="user", content="2 + 3?"), dict(role="assistant", content="It is")]
    text = scripts[name].render_chat(tokenizer, messages, is_prompt=True)
    assert text == "<|user|>2 + 3?<|end|><|assistant|>It is"
    text = scripts[name].render_chat(tokenizer, messages[:1], is_prompt=True)
    assert text == "<|user|>2 + 3?<|end|><|assistant|>"


def test_a_text_that_ends_with_eos(scripts, tiny_lm):
    """Many notebooks add EOS to the data. It is not added again."""
    sft, reward_model = scripts["sft"], scripts["reward_model"]
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    ids = tokenizer(" good").input_ids
    expected = [*ids, tokenizer.eos_token_id]
    responses = [" good", f" good{tokenizer.eos_token}"]
    for text in responses:
        assert sft.make_document({"text": text}, tokenizer, sft.Args(), {}) == (expected, expected)
        row = dict(prompt=" good", completion=text)
        document, labels = sft.make_document(row, tokenizer, sft.Args(), {})
        assert document == ids + expected and labels == [-100] * len(ids) + expected
    assert reward_model.preference_ids(tokenizer, " good", responses, 99) == [ids + expected] * 2


def test_a_template_of_an_empty_column(scripts, tiny_lm):
    """A row without a question is no task about "None"."""
    script, tokenizer = scripts["grpo_math"], AutoTokenizer.from_pretrained(tiny_lm())
    args = script.Args(prompt_template="Solve {question}!", system_prompt=None, max_prompt_length=90)
    rows = [dict(question=x, answer=y) for x, y in (("2 + 3", None), (None, "5"), ("", "5"))]
    tasks = script.load_tasks(rows, tokenizer, args)
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
    (first, second), _ = script.load_preference_rows(pairs, tokenizer, script.Args(max_length=200))
    assert first.texts == second.texts
    assert tokenizer.decode(first.texts[0]) == "<|user|>Hi<|end|><|assistant|>a<|end|>"


def test_special_tokens_of_the_text(script, tiny_lm):
    """trl#2897: a reward that looks for <answer> must see it. BOS, EOS and pad are no text."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>"]})
    response = tokenizer("<answer>5").input_ids + [tokenizer.eos_token_id]
    prompts, responses = script.decode(tokenizer, [tokenizer("2 + 3").input_ids], [response])
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
