"""Whole runs of ppo_dialog.py on tiny models: prompts, the parts of the reward, the coefficient of the KL, models, the last table."""

import functools
import json
import math
import types

import pytest
import torch
import transformers
from run_tools import reward_file, rows_of, same, spy, weights, write_rows
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

pytest_plugins = ["run_fixtures"]
CPU, ROOM = torch.device("cpu"), 32  # tokens: the longest that the talker has to say is 30
LENGTH = "return [len(r) / 10 for r in responses]"
TABLE = ["rouge1", "rougeLsum", "meteor", "sacrebleu", "intent", "tokens an answer", "distinct1", "distinct2",
         "perplexity of the references", "score mean", "score median", "KL, nats a response", "custom/questions"]  # fmt: skip
CLASSIFIER = types.SimpleNamespace(config=types.SimpleNamespace(num_labels=4))  # what load_turns asks of a classifier of acts


@pytest.fixture
def script(scripts):
    return scripts["ppo_dialog"]


@pytest.fixture
def talk(dialog, talker):
    """talk(folder="run", **changes): a run that starts from the talker, on the dialogues that it knows."""
    flags = dict(model_name_or_path=talker.model, dataset_name=talker.data, utterance_end=" <EOU>", response_length=ROOM)
    return functools.partial(dialog, **flags)


def table_of(folder):
    """evaluation.json of a run."""
    return json.loads((folder / "evaluation.json").read_text())


def turns_of(script, data, tokenizer, classifier=CLASSIFIER, **flags):
    """The turns of the train split of a data set."""
    return script.load_turns(script.load_splits(data)[0], tokenizer, classifier, script.Args(**flags))


# ---- Learning rate 0 -------------------------------------------------------------------------------------------------
def test_learning_rate_0_changes_nothing(dialog, tiny_lm):
    """The first ratio is 1 up to the rounding of another padding, the KL 0, and the weights stay to the bit, in both updates."""
    model, folder, metrics = dialog(learning_rate=0.0, total_episodes=16)
    assert len(metrics) == 2
    for row in metrics:
        assert abs(row["val/ratio"] - 1) <= 1e-5 and row["policy/approxkl_avg"] <= 1e-10
        assert (row["objective/kl"], row["policy/clipfrac_avg"]) == (0.0, 0.0)
    assert same(weights(folder / "model"), weights(tiny_lm()))
    assert not model.value_head.weight.any()


def test_other_splits_of_the_batch_sample_the_same_tokens(talk, script, monkeypatch):
    """Micro-batches and rollout batches of other sizes: the same answers and scores, and a ratio within 1e-4 of 1."""
    seen = []
    for i, (rollout, n, accumulation, minibatches) in enumerate([(8, 4, 1, 2), (3, 2, 2, 2), (1, 1, 8, 1)]):
        with monkeypatch.context() as patch:
            calls = spy(patch, script, "rollout_answers")
            sizes = dict(per_device_train_batch_size=n, gradient_accumulation_steps=accumulation, num_mini_batches=minibatches)
            _, _, metrics = talk(f"run{i}", learning_rate=0.0, local_rollout_forward_batch_size=rollout, temperature=1.3, **sizes)
        assert abs(metrics[0]["val/ratio"] - 1) < 1e-4 and abs(metrics[0]["objective/kl"]) < 1e-4
        seen.append(([(b["ids"].tolist(), b["lengths"].tolist(), answers) for _, (b, answers) in calls], metrics[0]["objective/scores"]))
    assert seen[0][0] == seen[1][0] == seen[2][0] and len(set(seen[0][0][1][1])) > 2
    assert seen[0][1] == pytest.approx(seen[1][1], abs=1e-5) == pytest.approx(seen[2][1], abs=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.4])
def test_the_sampled_distribution_is_the_scored_one(talk, script, talker, monkeypatch, temperature):
    """Trick 11: tokens are drawn from softmax(logits / temperature), and the old and the reference's log-probabilities are of that."""
    calls = spy(monkeypatch, script, "rollout_answers")
    talk(learning_rate=0.0, temperature=temperature)
    (args, (b, _)), model = calls[1], AutoModelForCausalLM.from_pretrained(talker.model).eval()
    for ids, mask, n, uniforms, *scored in zip(b["ids"], b["mask"], b["lengths"], args[4][2], b["logprobs"], b["ref_logprobs"]):
        ids = ids[mask]  # one by one, without pads, in plain transformers
        with torch.no_grad():
            logits = model(ids[None]).logits[0, -n - 1 : -1] / temperature
        assert torch.equal(script.sample_tokens(logits.softmax(-1), uniforms[:n]), ids[-n:])
        for logprobs in scored:
            expected = logits.log_softmax(-1).gather(1, ids[-n:, None])[:, 0]
            torch.testing.assert_close(logprobs[:n], expected, atol=1e-3, rtol=1e-3)


# ---- Prompts ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count, length, ids", [
    (2, 10, [4, 5, 6, 7]), (9, 10, [1, 2, 3, 4, 5, 6, 7]), (3, 5, [3, 4, 5, 6, 7]), (3, 4, [4, 5, 6, 7]), (3, 3, [7]), (1, 1, [7]),
])  # fmt: skip
def test_a_prompt_is_the_end_of_a_dialogue(script, count, length, ids):
    """The last utterances, of which the oldest are left out whole until they fit."""
    args = script.Args(num_context_utterances=count, max_prompt_length=length)
    assert script.context_ids([[1, 2], [3], [4, 5, 6], [7]], args) == ids


def test_a_long_utterance_is_cut_at_its_beginning(script):
    """One that is too long alone keeps its end, whatever stood before it."""
    args = script.Args(num_context_utterances=3, max_prompt_length=4)
    assert script.context_ids([[8, 9], [1, 2, 3, 4, 5, 6]], args) == script.context_ids([[1, 2, 3, 4, 5, 6]], args) == [3, 4, 5, 6]


@pytest.mark.parametrize("end", ["eos", " <EOU>"])
@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_a_prompt_is_the_beginning_of_its_document(script, scripts, tiny_lm, metaspace_lm, tiny_dialogs, end, kind):
    """Trick 7: sft.py learns a dialogue by the very ids that ppo_dialog.py asks by, and the reference follows with its own."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm() if kind == "byte-level" else metaspace_lm)
    flags = dict(utterance_end=end, num_context_utterances=99, max_prompt_length=999)
    sft, rows = scripts["sft"], script.load_splits(tiny_dialogs)[0]
    documents = {tuple(texts): ids for texts, (ids, _) in zip(rows["dialog"], sft.documents(rows, tokenizer, sft.Args(
        utterance_end=end, max_length=9999)))}  # fmt: skip
    turns = turns_of(script, tiny_dialogs, tokenizer, **flags)
    assert len(turns) == sum(len(texts) - 1 for texts in documents)
    for turn in turns:
        prompt = script.context_ids(turn.ids[: turn.place], script.Args(**flags))
        document = next(ids for texts, ids in documents.items() if list(texts[: turn.place + 1]) == [*turn.context, turn.reference])
        told = prompt + turn.ids[turn.place]
        assert document[: len(told)] == told and turn.previous == turn.context[-1]
        assert document[-1] == tokenizer.eos_token_id and document.count(tokenizer.eos_token_id) <= len(turn.ids)


def test_prompts_of_a_run(dialog, script, monkeypatch):
    """Each row is the ids of its turn's last two utterances, padded on the left; turns and uniforms are those of the update."""
    calls = spy(monkeypatch, script, "rollout_answers")
    dialog(total_episodes=16)
    updates = [args[3:5] for args, _ in calls[1:3]]
    for turns, (ids, mask, uniforms) in updates:
        assert len(turns) == 8 and uniforms.shape == (8, 6) and mask.sum(1).max() == mask.shape[1]
        for turn, row, m in zip(turns, ids, mask):
            assert row[m].tolist() == sum(turn.ids[: turn.place][-2:], []) and m.tolist() == sorted(m.tolist())
    assert not torch.equal(updates[0][1][2], updates[1][1][2])
    assert [turn.reference for turn in updates[0][0]] != [turn.reference for turn in updates[1][0]]


# ---- Reward ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("intent, meteor, function", [(0.5, 2.0, 3.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
def test_scores_are_the_weighted_sum_of_the_parts(talk, script, monkeypatch, tmp_path, intent, meteor, function):
    """Each part is logged as it is, the score is their sum with the weights, and that is what the tokens are paid."""
    rollouts, rewarded = spy(monkeypatch, script, "rollout_answers"), spy(monkeypatch, script, "token_rewards")
    flags = dict(intent_weight=intent, meteor_weight=meteor, reward_fn_weight=function)
    _, folder, rows = talk(reward_fn=reward_file(tmp_path, LENGTH), **flags)
    b, answers = rollouts[1][1]
    assert b["meteor"].max() > 0.5 and b["intent"].std() > 0.01
    assert torch.equal(b["reward_fn"], torch.tensor([len(answer) / 10 for answer in answers]))
    torch.testing.assert_close(b["scores"], intent * b["intent"] + meteor * b["meteor"] + function * b["reward_fn"])
    assert torch.equal(rewarded[0][0][0], b["scores"])
    for name in ("intent", "meteor", "reward_fn"):
        assert rows[0][name] == pytest.approx(b[name].mean().item())
    assert rows[0]["env/reward_mean"] == rows[0]["objective/scores"] == pytest.approx(b["scores"].mean().item())
    assert table_of(folder)["after"]["score mean"] == pytest.approx(rollouts[-1][1][0]["scores"].mean().item())


PREVIOUS = ["Where is the cat?", "Please  come\nin.", "long " * 300 + "ago?", "It is late."]
ANSWERS = ["It is on the mat.", "Thank\nyou,  I will.", "That was so.", ""]


@pytest.mark.parametrize("kind", ["own", "other"])
def test_intent_by_hand(script, small, tiny_intents, kind):
    """Tricks 23 and 38: the classifier reads "last answer", in its own tokenizer, of a long text the end; its class 0 is act 1."""
    model = AutoModelForSequenceClassification.from_pretrained(tiny_intents(kind)).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_intents(kind))
    texts = ["Where is the cat? It is on the mat.", "Please come in. Thank you, I will."]
    texts += ["long " * 300 + "ago? That was so.", "It is late. "]
    with torch.no_grad():  # one by one
        probs = torch.cat([model(torch.tensor([tokenizer(text).input_ids[-256:]])).logits for text in texts]).softmax(-1)
    turns = [script.Turn(["Before that.", last], "A reference.", act, []) for last, act in zip(PREVIOUS, (1, 2, 3, 4))]
    found = {}
    for reward in ("probability", "match"):
        args = small("ppo_dialog", reward_model_path=tiny_intents(kind), intent_reward=reward, local_rollout_forward_batch_size=3)
        parts, classifier, _ = script.load_reward_parts(args, CPU)
        found[reward] = parts(turns, ANSWERS)
        likeliest = [script.Turn(["Before that.", turn.previous], "", int(row.argmax()) + 1, []) for turn, row in zip(turns, probs)]
        assert parts(likeliest, ANSWERS)["intent_match"].tolist() == [1.0] * 4
    torch.testing.assert_close(found["probability"]["intent"], probs.diag(), atol=1e-5, rtol=1e-5)
    match = (probs.argmax(-1) == torch.arange(4)).float()
    assert torch.equal(found["match"]["intent"], match)
    assert torch.equal(found["match"]["intent_match"], match) and torch.equal(found["probability"]["intent_match"], match)


def test_intent_texts_are_those_the_classifier_learned(script, scripts, tiny_lm, tiny_dialogs):
    """reward_model.py makes the same texts of the same dialogues, with the act less 1 as the label."""
    turns = turns_of(script, tiny_dialogs, AutoTokenizer.from_pretrained(tiny_lm()))
    rows = scripts["reward_model"].act_rows(script.load_splits(tiny_dialogs)[0], scripts["reward_model"].Args())
    assert rows["text"] == script.intent_texts([turn.previous for turn in turns], [turn.reference for turn in turns])
    assert rows["label"] == [turn.act - 1 for turn in turns] and set(rows["label"]) == {0, 1, 2, 3}


def test_a_reward_function_alone(talk, script, monkeypatch, tmp_path):
    """It gets the whole context, a line an utterance, and the answer without its mark; what it returns is the whole score."""
    body = "for p, r in zip(prompts, responses):\n    open(os.path.dirname(__file__) + '/seen', 'a').write(repr((p, r)) + '\\n')\n" \
           "return [float(i) for i in range(len(prompts))]"  # fmt: skip
    calls = spy(monkeypatch, script, "rollout_answers")
    flags = dict(intent_weight=0.0, meteor_weight=0.0, num_context_utterances=1)
    _, _, rows = talk(reward_fn=reward_file(tmp_path, body), **flags)
    assert rows[0]["objective/scores"] == 3.5 and (rows[0]["env/reward_mean"], rows[0]["reward_fn"]) == (3.5, 3.5)
    seen = [eval(line) for line in (tmp_path / "seen").read_text().splitlines()]
    asked = [("\n".join(turn.context), answer) for args, (_, answers) in calls for turn, answer in zip(args[3], answers)]
    assert seen == asked and any("\n" in prompt for prompt, _ in seen)
    assert not any("EOU" in answer for _, answer in seen[4:12]) and any(answer.endswith((".", "?")) for _, answer in seen)


def test_without_an_intent(dialog, tmp_path, tiny_dialogs):
    """reward_model_path None: the data need no acts, and no intent is logged, in the table nor among the samples."""
    rows = [dict(dialog=row["dialog"]) for row in rows_of(tiny_dialogs, "train.jsonl")]
    data = write_rows(tmp_path / "data", train=rows, test=rows)
    _, folder, metrics = dialog(reward_model_path=None, dataset_name=data)
    assert "intent" not in metrics[0] and metrics[0]["meteor"] == metrics[0]["objective/scores"]
    assert list(table_of(folder)["before"]) == [name for name in TABLE if name != "intent"]
    assert list(rows_of(folder, "samples.jsonl")[0]) == ["update", "last", "reference", "answer", "meteor", "kl"]


def fake_wordnet(**synonyms):
    """A WordNet of these words alone. -> what nltk.corpus.wordnet is"""
    def synsets(word):
        names = [types.SimpleNamespace(name=functools.partial(str, name)) for name in synonyms.get(word, ())]
        return [types.SimpleNamespace(lemmas=lambda: names)]

    return types.SimpleNamespace(synsets=synsets, ensure_loaded=lambda: None)


def missing():
    raise LookupError("no such package")


def test_meteor_is_nltks(script, monkeypatch):
    """On nltk's words, with Porter's stemmer; by hand F (1 - 0.5 (chunks / matches)^3), F of precision and recall, 1 to 9."""
    from nltk.stem import PorterStemmer
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.translate.meteor_score import single_meteor_score
    monkeypatch.setattr("nltk.corpus.wordnet", types.SimpleNamespace(ensure_loaded=missing))
    meteor, matches = script.load_meteor()
    assert matches == "exact and stem matches, WordNet is not installed"
    pairs = [("The cats sat on the mat.", "A cat was sitting there, on the mat."), ("I don't know.", "You do not know"), ("Yes.", "No!"),
             ("I will lend you my bike.", "I will lend you my bike."), ("Fine.", ""), ("It is late.", "late it is late is it")]  # fmt: skip
    words, empty = NLTKWordTokenizer().tokenize, fake_wordnet()
    for reference, answer in pairs * 2:  # twice, since words and stems are kept
        expected = single_meteor_score(words(reference), words(answer), stemmer=PorterStemmer(), wordnet=empty)
        assert meteor(reference, answer) == expected
    assert meteor("the cats sat", "the cat sat") == pytest.approx(1 - 0.5 * (1 / 3) ** 3)  # one chunk of three, thanks to the stem
    precision, recall = 2 / 2, 2 / 4
    assert meteor("the cat sat here", "the cat") == pytest.approx(10 * precision * recall / (recall + 9 * precision) * (1 - 0.5 / 8))
    assert meteor("a great dog", "a big dog") == pytest.approx(2 / 3 * (1 - 0.5 * (2 / 2) ** 3)) and meteor("Yes.", "") == 0


def test_meteor_with_wordnet(script, monkeypatch):
    """Where WordNet is installed synonyms count, and the line says so."""
    monkeypatch.setattr("nltk.corpus.wordnet", fake_wordnet(big=["huge", "great"]))
    meteor, matches = script.load_meteor()
    assert matches == "exact, stem and WordNet synonym matches"
    assert meteor("a great dog", "a big dog") == pytest.approx(1 - 0.5 * (1 / 3) ** 3)  # nltk looks up stems: "great" is its own
    assert meteor("a small dog", "a big dog") == pytest.approx(1 / 3)


@pytest.mark.parametrize("flags", [dict(), dict(score_clip=0.3), dict(kl_estimator="k2"), dict(kl_estimator="k3", whiten_rewards=True)],
                         ids=["k1", "clip", "k2", "k3-whiten"])  # fmt: skip
def test_rewards_by_hand(talk, script, monkeypatch, flags):
    """Score, clip, EOS penalty, KL, whitening, in this order, in the second update, whose KL is not 0."""
    rollouts, advantages = spy(monkeypatch, script, "rollout_answers"), spy(monkeypatch, script, "gae")
    sizes = dict(response_length=12, temperature=1.2, total_episodes=16, learning_rate=1e-3)
    _, _, rows = talk(kl_coef=0.3, missing_eos_penalty=0.5, **sizes, **flags)
    b, (rewards, values, mask, gamma, lam) = rollouts[2][1][0], advantages[1][0]
    assert 0 < b["stopped"].sum() < 8 and abs(rows[1]["objective/kl"]) > 1e-3
    expected = torch.zeros(8, 12)
    for i in range(8):
        n = int(b["lengths"][i])
        for t in range(n):
            x = (b["logprobs"] - b["ref_logprobs"])[i, t].item()
            expected[i, t] = -0.3 * {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[flags.get("kl_estimator", "k1")]
        score = b["scores"][i].item()
        score = min(max(score, -0.3), 0.3) if "score_clip" in flags else score
        expected[i, n - 1] += score - (0 if b["stopped"][i] else 0.5)
    if "whiten_rewards" in flags:
        mean = expected[mask].mean()
        expected = torch.where(mask, mean + (expected - mean) / expected[mask].std(correction=0), 0)
    torch.testing.assert_close(rewards, expected, atol=1e-5, rtol=1e-3)
    assert mask.sum(1).tolist() == b["lengths"].tolist() and torch.equal(values, b["values"]) and (gamma, lam) == (1.0, 0.95)
    assert rows[1]["objective/non_score_reward"] == pytest.approx(-0.3 * rows[1]["objective/kl"])
    assert rows[1]["objective/rlhf_reward"] == pytest.approx(rows[1]["objective/scores"] + rows[1]["objective/non_score_reward"])


def test_adaptive_kl_coefficient(dialog, script, monkeypatch):
    """With kl_target it follows Ziegler's formula, from one update to the next, and is what the rewards are made with."""
    calls = spy(monkeypatch, script, "token_rewards")
    _, _, rows = dialog(kl_target=0.5, kl_horizon=100, kl_coef=0.3, total_episodes=32)
    assert rows[0]["objective/kl_coef"] == 0.3 and [args[3] for args, _ in calls] == [row["objective/kl_coef"] for row in rows]
    for row, after in zip(rows, rows[1:]):
        error = min(max(row["objective/kl"] / 0.5 - 1, -0.2), 0.2)
        assert after["objective/kl_coef"] == pytest.approx(row["objective/kl_coef"] * (1 + error * 8 / 100), rel=1e-6)
    assert len({row["objective/kl_coef"] for row in rows}) == 4
    _, _, rows = dialog("fixed", kl_target=None, kl_coef=0.3, total_episodes=16)
    assert [row["objective/kl_coef"] for row in rows] == [0.3] * 2


def test_values_in_the_range_are_not_clipped(dialog):
    """With a range that no value leaves, no value counts as clipped."""
    _, _, rows = dialog(cliprange_value=1e3, total_episodes=16, vf_coef=1.0)
    assert [row["val/clipfrac_avg"] for row in rows] == [0.0, 0.0]


def test_rewarded_behaviour_is_learned(dialog, tmp_path):
    """A reward for one letter, which replaces intent and METEOR: its count rises over 12 updates."""
    sizes = dict(per_device_train_batch_size=16, total_episodes=12 * 32, local_rollout_forward_batch_size=32, kl_coef=0.0)
    reward_fn = reward_file(tmp_path, "return [float(r.count('e')) for r in responses]")
    _, _, rows = dialog(reward_fn=reward_fn, intent_weight=0.0, meteor_weight=0.0, **sizes)
    scores = [row["objective/scores"] for row in rows]
    assert sum(scores[-3:]) / 3 > 2 * sum(scores[:3]) / 3 + 1, scores


# ---- Text ------------------------------------------------------------------------------------------------------------
def test_answers_are_what_was_said(talk, script, monkeypatch):
    """From texts with " <EOU>" to texts without: ids, lengths, answers and stops belong together; a known dialogue is answered by heart."""
    calls = spy(monkeypatch, script, "rollout_answers")
    _, folder, rows = talk(learning_rate=0.0, temperature=0.5)
    (_, tokenizer, _, turns, *_), (b, answers) = calls[1]
    for turn, answer, ids, n in zip(turns, answers, b["ids"], b["lengths"].tolist()):
        text = tokenizer.decode(ids[-ROOM:][:n])
        assert text == f" {answer} <EOU>" and answer == turn.reference and turn.ids[turn.place] == ids[-ROOM:][:n].tolist()
    assert rows[0]["val/num_eos_tokens"] == 8 and rows[0]["meteor"] > 0.99 and rows[0]["completions/clipped_ratio"] == 0
    assert rows[0]["completions/mean_length"] == b["lengths"].float().mean() and torch.equal(b["mask"][:, -ROOM:].sum(1), b["lengths"])


def test_samples(talk):
    """What was said last, the reference, the answer, and the parts of its score; with the function's where there is one."""
    _, folder, rows = talk(num_sample_generations=2, total_episodes=16)
    samples = rows_of(folder, "samples.jsonl")
    assert [row["update"] for row in samples] == [1] * 4 + [2] * 4
    assert list(samples[0]) == ["update", "last", "reference", "answer", "intent", "meteor", "kl"]
    assert all(row["kl"] == 0 for row in samples[:4]) and any(row["kl"] != 0 for row in samples[4:])
    exact = [row for row in samples if row["answer"] == row["reference"]]
    assert exact and all(row["meteor"] > 0.8 for row in exact) and all(0 < row["intent"] < 1 for row in samples)


# ---- The last table --------------------------------------------------------------------------------------------------
def test_text_metrics_of_published_examples(script):
    """rouge-score's README: ROUGE-1 12/17, ROUGE-L 10/17; sacrebleu's README: its three sentences and their first references."""
    fox = "The quick brown fox jumps over the lazy dog", "The quick brown dog jumps on the log."
    found = script.text_metrics([fox[1]], [fox[0]])
    assert found["rouge1"] == pytest.approx(12 / 17) and found["rougeLsum"] == pytest.approx(10 / 17)
    half = script.text_metrics([fox[1], "Yes."], [fox[0], "Yes."])
    assert half["rouge1"] == pytest.approx((12 / 17 + 1) / 2)  # a mean over answers, not over their words
    answers = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."]
    references = ["The dog bit the man.", "It was not unexpected.", "The man bit him first."]
    shares = [12 / 17, 6 / 14, 4 / 11, 3 / 8]  # of 1- to 4-grams that a reference has, tokenised as WMT's 13a; 17 words each
    assert script.text_metrics(answers, references)["sacrebleu"] == pytest.approx(math.prod(shares) ** 0.25, rel=1e-6)


def test_text_metrics_edges(script):
    """The same texts give 1, others 0, empty answers 0 and no nan; a word's ending does not matter to ROUGE, nor its case to distinct-n."""
    texts = ["Could you lend me your bike, please?", "Of course, I will lend you my bike."]
    found = script.text_metrics(texts, texts)
    assert [found[name] for name in ("rouge1", "rougeLsum", "sacrebleu")] == pytest.approx([1, 1, 1])
    assert set(script.text_metrics(["xyz"], ["a b c d"]).values()) == {0.0, 1.0} and script.text_metrics(["xyz"], ["a b"])["rouge1"] == 0
    assert set(script.text_metrics(["", ""], texts).values()) == {0.0}
    assert script.text_metrics(["two dogs"], ["two dog"])["rouge1"] == 1
    found = script.text_metrics(["a b A b", "a c"], ["x", "y"])  # a b a b a c, and ab ba ab ac
    assert (found["distinct1"], found["distinct2"]) == (3 / 6, 3 / 4)


def test_table(talk, script, monkeypatch):
    """Every number is there, before and after; with learning rate 0 they are the same, and so are those of the same run again."""
    calls = spy(monkeypatch, script, "evaluate_dialogs")
    _, folder, _ = talk(learning_rate=0.0)
    about = table_of(folder)
    assert list(about["before"]) == TABLE and about["before"] == about["after"] and about["n"] == 4
    assert set(about) == {"before", "after", "references", "n", "judge", "meteor", "decoding"} and "matches" in about["meteor"]
    assert "temperature 1.0, up to 32 tokens" in about["decoding"]
    _, folder, _ = talk("moved", learning_rate=1e-2)
    moved = table_of(folder)
    assert moved["before"] == about["before"] and moved["after"] != moved["before"] and moved["before"]["KL, nats a response"] == 0
    (numbers, answers, scores), (_, _, parts, turns, *_) = calls[0][1], calls[0][0]
    text = script.text_metrics(answers, [turn.reference for turn in turns])
    assert {name: numbers[name] for name in text} == pytest.approx(text)
    assert numbers["meteor"] == pytest.approx(parts(turns, answers)["meteor"].mean().item())
    assert numbers["intent"] == parts(turns, answers)["intent_match"].mean()  # whatever intent_reward is
    assert numbers["score mean"] == pytest.approx(sum(scores) / 4)
    assert numbers["score median"] == pytest.approx(sum(sorted(scores)[1:3]) / 2)
    own, said = about["references"], [turn.reference for turn in turns]  # what people's own answers measure
    text = script.text_metrics(said, said)
    assert (own["distinct1"], own["distinct2"]) == (text["distinct1"], text["distinct2"]) and "rouge1" not in own
    assert own["tokens an answer"] == sum(len(turn.ids[turn.place]) for turn in turns) / 4
    assert own["custom/questions"] == sum(text.endswith("?") for text in said) / 4 and set(own) <= set(numbers)


@pytest.mark.parametrize("end", ["eos", " <EOU>"])
def test_perplexity_of_the_references(dialog, script, monkeypatch, tiny_lm, end):
    """transformers' own loss on context + reference, one by one, over all tokens of the references, their ends included."""
    calls = spy(monkeypatch, script, "evaluate_dialogs")
    _, folder, _ = dialog(utterance_end=end, max_prompt_length=200, temperature=0.7, num_eval_prompts=10)  # scored at temperature 1
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_lm()).eval(), AutoTokenizer.from_pretrained(tiny_lm())
    mark, eos = ("", [tokenizer.eos_token_id]) if end == "eos" else (end, [])
    losses, count = 0.0, 0
    for turn in calls[0][0][3]:
        *context, told = [tokenizer(f" {text}{mark}").input_ids + eos for text in [*turn.context[-2:], turn.reference]]
        ids = torch.tensor([sum(context, []) + told])
        labels = torch.where(torch.arange(ids.shape[1]) < sum(map(len, context)), -100, ids)
        with torch.no_grad():
            losses += model(ids, labels=labels).loss.item() * len(told)
        count += len(told)
    assert table_of(folder)["before"]["perplexity of the references"] == pytest.approx(math.exp(losses / count), rel=1e-4)


def test_a_reference_longer_than_the_context(dialog, tmp_path):
    """One held-out answer of 300 words does not end a run, before or after the training."""
    rows = [dict(dialog=["Hello.", "word " * 300, "Fine."], act=[1, 2, 1])] * 12
    _, folder, _ = dialog(dataset_name=write_rows(tmp_path / "data", train=rows, test=rows))
    assert math.isfinite(table_of(folder)["after"]["perplexity of the references"])


def test_a_reference_longer_than_the_critics_context(dialog, tmp_path, tiny_lm):
    """References are read by the policy alone."""
    config = transformers.AutoConfig.from_pretrained(tiny_lm(), n_positions=60)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "critic")
    rows = [dict(dialog=["Hello.", "word " * 40, "Fine."], act=[1, 2, 1])] * 12
    data = write_rows(tmp_path / "data", train=rows, test=rows)
    _, folder, _ = dialog(dataset_name=data, value_model_path=str(tmp_path / "critic"))
    assert math.isfinite(table_of(folder)["after"]["perplexity of the references"])


def test_custom_metrics(talk, script, monkeypatch):
    """A number of the user's stands in the log of every update and in the table, made of turns and answers that belong together."""
    calls = []

    def custom(turns, answers):
        calls.append((turns, answers))
        hits = [turn.reference == answer for turn, answer in zip(turns, answers, strict=True)]
        return {"custom/exact": torch.tensor(hits, dtype=torch.float64).mean()}  # a tensor will do

    monkeypatch.setattr(script, "custom_metrics", custom)
    _, folder, rows = talk(learning_rate=0.0, temperature=0.8, total_episodes=16)
    exact = [sum(turn.reference == answer for turn, answer in zip(*call)) / len(call[1]) for call in calls]
    assert [len(answers) for _, answers in calls] == [4, 8, 8, 4, 4] and 0.5 < exact[1] < exact[4] == 1
    assert [row["custom/exact"] for row in rows] == exact[1:3]
    assert [table_of(folder)[column]["custom/exact"] for column in ("before", "after", "references")] == [exact[i] for i in (0, 3, 4)]
    assert "custom/questions" not in rows[0]


# ---- Models ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flags", [dict(lora_r=4), dict(lora_r=4, load_in_8bit=True), dict(load_in_8bit=True), dict(num_shared_layers=1),
                                   dict(gradient_checkpointing=True), dict(bf16=True)], ids=lambda flags: "-".join(flags))  # fmt: skip
def test_parts(dialog, flags):
    """Each trains: the KL starts at 0 (bf16 and 8 bit: near it) and leaves it."""
    _, folder, rows = dialog(total_episodes=16, **flags)
    assert abs(rows[0]["objective/kl"]) < (0.5 if "load_in_8bit" in flags or "bf16" in flags else 1e-6)
    assert abs(rows[-1]["objective/kl"]) > 1e-3
    assert all(math.isfinite(x) for row in rows for x in row.values()) and (folder / "model").exists()


def test_critic_of_its_own(dialog, tiny_lm):
    """The critic's weights move, and stand beside the policy with the value head."""
    _, folder, _ = dialog(value_model_path=tiny_lm("llama"), vf_coef=1.0)
    before = transformers.AutoModel.from_pretrained(tiny_lm("llama")).state_dict()
    after = transformers.AutoModel.from_pretrained(folder / "model/critic").state_dict()
    assert sum(not torch.equal(before[name], after[name]) for name in before) >= 0.8 * len(before)
    assert (folder / "model/critic/value_head.safetensors").exists()


@pytest.mark.parametrize("arch", ["gpt_neox", "llama"])
def test_architectures(dialog, tiny_lm, arch):
    """One update moves the weights, and model/ in plain transformers is the policy that was trained."""
    model, folder, rows = dialog(model_name_or_path=tiny_lm(arch))
    assert rows[0]["objective/kl"] == 0 and rows[0]["val/ratio"] != 1
    before, after = weights(tiny_lm(arch)), weights(folder / "model")
    assert sum(not torch.equal(before[name], after[name]) for name in before) >= 0.8 * len(before)
    plain, ids = AutoModelForCausalLM.from_pretrained(folder / "model").eval(), torch.randint(0, 1000, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model.policy.eval()(ids).logits)


def test_on_device(script):
    """Frozen models are on the device for as long as they are used, and wait on the CPU with --offload alone."""
    class Model:
        to = lambda self, device: moves.append(device)  # noqa: E731

    for offload, left in ((True, ["cpu", "cpu"]), (False, [])):
        moves = []
        with script.on_device("cuda", offload, Model(), Model()):
            assert moves == ["cuda", "cuda"]
        assert moves[2:] == left


def test_offload(dialog, script, monkeypatch):
    """Reference and classifier are fetched for each rollout and sent away before the steps; the run is the same to the bit."""
    _, plain, rows = dialog("plain")
    events, move, step = [], transformers.PreTrainedModel.to, torch.optim.Adam.step
    rollout = script.rollout_answers

    def moved(self, device):
        events.append((type(self).__name__, "away" if device == "cpu" else "here"))
        return move(self, device)

    monkeypatch.setattr(transformers.PreTrainedModel, "to", moved)
    monkeypatch.setattr(script, "rollout_answers", lambda *args: (events.append("rollout"), rollout(*args))[1])
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self, *args, **kwargs: (events.append("step"), step(self, *args, **kwargs))[1])
    _, folder, other = dialog("offload", offload=True)
    names = ("GPT2LMHeadModel", "DistilBertForSequenceClassification")
    used = [*((name, "here") for name in names), "rollout", *((name, "away") for name in names)]
    assert events[1:] == [*used, *used, *["step"] * 4, *used]  # the first one is the loading of the classifier
    assert same(weights(plain / "model"), weights(folder / "model")) and rows[0]["objective/scores"] == other[0]["objective/scores"]
