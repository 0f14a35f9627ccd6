"""Whole runs of ppo_dialog.py on tiny models: prompts, the parts of the reward, answers, the final table.

What it has in common with ppo_sentiment.py is tested there.
"""

import functools
import math
import types
from statistics import fmean

import pytest
import torch
from run_tools import evaluation_of, rows_of, write_rows
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

pytest_plugins = ["run_fixtures"]
SCRIPT = "ppo_dialog"
CPU = torch.device("cpu")
LIMIT = 32  # tokens: the talker's longest answer has 30


@pytest.fixture
def talk(dialog, talker):
    """talk(folder="run", **changes): a run that starts from the talker, on the dialogs that it knows."""
    return functools.partial(
        dialog,
        model_name_or_path=talker.model,
        dataset_name=talker.data,
        utterance_end=" <EOU>",
        response_length=LIMIT,
    )


def load_prompts(script, rows, tokenizer, **flags):
    """The turns of these dialogs, for a classifier of acts."""
    return script.load_prompts(rows, tokenizer, script.Args(**flags))


# ---- Prompts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count, max_length, bos, prompt",
    [
        (2, 10, [], [4, 5, 6, 7]),
        (9, 10, [], [1, 2, 3, 4, 5, 6, 7]),
        (3, 5, [], [3, 4, 5, 6, 7]),
        (3, 4, [], [4, 5, 6, 7]),
        (3, 3, [], [7]),
        (1, 1, [], [7]),
        (3, 4, [0], [0, 7]),  # BOS counts
    ],
)
def test_a_prompt_is_the_end_of_a_dialog(script, count, max_length, bos, prompt):
    """The last utterances. The oldest are left out as a whole until the others fit."""
    args = script.Args(num_context_utterances=count, max_prompt_length=max_length)
    found, is_too_long = script.context_ids([[1, 2], [3], [4, 5, 6], [7]], args, bos)
    whole_context = sum([2, 1, 3, 1][-count:])  # tokens
    assert found == prompt and is_too_long == (len(prompt) < len(bos) + whole_context)


def test_utterances_lose_their_outer_spaces(script):
    """DailyDialog's end with one. A dialog with a blank utterance is left out."""
    rows = [dict(dialog=["Hi . ", " \tHello ?"], act=[1, 2]), dict(dialog=["Hi .", " "], act=[1, 2])]
    assert script.load_dialogs(rows) == [(rows[0], ["Hi .", "Hello ?"], [1, 2])]


def test_a_long_utterance_loses_its_beginning(script):
    """If the last utterance alone is too long, its end is the prompt."""
    args = script.Args(num_context_utterances=3, max_prompt_length=4)
    assert script.context_ids([[8, 9], [1, 2, 3, 4, 5, 6]], args) == ([3, 4, 5, 6], True)
    assert script.context_ids([[8, 9], [1, 2, 3, 4, 5, 6]], args, bos=[0]) == ([0, 4, 5, 6], True)


@pytest.mark.parametrize("end", ["eos", " <EOU>"])
@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "bos"])
def test_a_prompt_is_the_beginning_of_its_document(
    script, scripts, tiny_lm, metaspace_lm, bang_lm, tiny_dialogs, end, kind
):
    """Trick 7: prompt and reference are, token by token, the beginning of what sft.py learns."""
    folder = {"byte-level": tiny_lm(), "metaspace": metaspace_lm, "bos": bang_lm(bos=True)}[kind]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sft = scripts["sft"]
    rows = rows_of(tiny_dialogs, "train.jsonl")
    documents = [sft.dialog_document(row, tokenizer, sft.Args(utterance_end=end)) for row in rows]
    flags = dict(utterance_end=end, num_context_utterances=99, max_prompt_length=999)
    turns = iter(load_prompts(script, rows, tokenizer, **flags))
    for row, (ids, _) in zip(rows, documents, strict=True):
        utterances = row["dialog"]
        assert ids[-1] == tokenizer.eos_token_id
        assert (ids[0] == tokenizer.bos_token_id) == (kind == "bos")
        for t in range(1, len(utterances)):
            turn = next(turns)
            assert turn.context == utterances[:t]
            assert turn.reference == utterances[t]
            start = turn.prompt_tokens + turn.reference_tokens
            assert ids[: len(start)] == start
    assert next(turns, None) is None


def test_which_turns_are_used(script, tiny_lm):
    """Turns without an act are left out, and so are dialogs with a blank utterance."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm())
    good = dict(dialog=["Hi.", "Ho.", "Hum."], act=[1, 2, 4])
    rows = [good, good | dict(act=[1, 2]), good | dict(dialog=["Hi.", " ", "Hum."]), dict(dialog=["Hi."])]
    rows += [good | dict(act=[1, None, 3]), dict(text="Hi."), dict(dialog=None)]
    turns = load_prompts(script, rows, tokenizer)
    assert [(turn.reference, turn.act) for turn in turns] == [("Ho.", 2), ("Hum.", 4), ("Hum.", 3)]


def test_what_is_left_out_is_counted(dialog, tmp_path, capsys):
    """Turns without an act, and prompts that are cut to --max-prompt-length."""
    row = dict(dialog=["Hi.", "How are you, my friend?", "Fine."], act=[1, 2, 1])
    rows = [row, row | dict(act=[1, 2])]
    data = write_rows(tmp_path / "data", train=rows * 8, test=rows * 2)
    dialog(dataset_name=data, max_prompt_length=8)
    screen = capsys.readouterr().out
    for rows, answers, used, cut in ((16, 32, 16, 8), (4, 8, 4, 2)):
        line = f"{rows} of {rows} rows have a dialog, {used} of {answers} answers are used, {cut} of their "
        assert f"{line}prompts are cut to 8 tokens" in screen


# ---- The parts of the reward -------------------------------------------------------------------------------


PREVIOUS = ["Where is the cat?", "Please  come\nin.", "long " * 300 + "ago?", "It is late."]
ANSWERS = ["It is on the mat.", "Thank\nyou,  I will.", "That was so.", ""]
READ = [
    "Where is the cat? It is on the mat.",
    "Please come in. Thank you, I will.",
    "long " * 300 + "ago? That was so.",
    "It is late. ",
]


def turns_with_acts(script, acts):
    """Turns that PREVIOUS leads to, with these acts."""
    turns = []
    for last, act in zip(PREVIOUS, acts):
        turns.append(script.Turn({}, ["Before.", last], "A reference.", act, [], []))
    return turns


@pytest.mark.parametrize("kind", ["own", "other"])
def test_intent_by_hand(script, small, tiny_intents, kind):
    """Tricks 23 and 38: the classifier reads "last answer" with its own tokenizer. Its class 0 is act 1."""
    model = AutoModelForSequenceClassification.from_pretrained(tiny_intents(kind)).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_intents(kind), model_max_length=256)
    tokenizer.save_pretrained(tiny_intents(kind))
    logits = []
    with torch.no_grad():
        for text in READ:
            ids = tokenizer(text).input_ids[-256:]
            logits.append(model(torch.tensor([ids])).logits)
    probs = torch.cat(logits).softmax(-1)
    match = (probs.argmax(-1) == torch.arange(4)).float()
    likeliest_acts = (probs.argmax(-1) + 1).tolist()

    found = {}
    for reward in ("probability", "match"):
        args = small(
            "ppo_dialog",
            reward_model_path=tiny_intents(kind),
            intent_reward=reward,
            local_rollout_forward_batch_size=3,
        )
        get_scores = script.load_reward(args, None, CPU)
        found[reward] = get_scores(turns_with_acts(script, [1, 2, 3, 4]), ANSWERS, [[]] * 4)
        assert torch.equal(found[reward]["intent_match"], match)
        likeliest = get_scores(turns_with_acts(script, likeliest_acts), ANSWERS, [[]] * 4)
        assert likeliest["intent_match"].tolist() == [1.0] * 4
    torch.testing.assert_close(found["probability"]["intent"], probs.diag(), atol=1e-5, rtol=1e-5)
    assert torch.equal(found["match"]["intent"], match)


def test_intent_texts_are_those_the_classifier_learned(script, scripts, tiny_lm, tiny_dialogs):
    """reward_model.py makes the same texts of the same dialogs; its label is the act minus 1."""
    reward_model = scripts["reward_model"]
    rows = rows_of(tiny_dialogs, "train.jsonl")
    turns = load_prompts(script, rows, AutoTokenizer.from_pretrained(tiny_lm()))
    rows = reward_model.load_answers(rows)
    previous = [turn.context[-1] for turn in turns]
    references = [turn.reference for turn in turns]
    labels = [row["label"] for row in rows]
    assert [row["text"] for row in rows] == script.intent_texts(previous, references)
    assert labels == [turn.act - 1 for turn in turns]
    assert set(labels) == {0, 1, 2, 3}


def test_without_an_intent(dialog, tmp_path, tiny_dialogs):
    """With --reward-model-path None the data need no acts, and no intent is logged or shown."""
    splits = {}
    for split in ("train", "test"):
        splits[split] = [dict(dialog=row["dialog"]) for row in rows_of(tiny_dialogs, f"{split}.jsonl")]
    data = write_rows(tmp_path / "data", **splits)
    _, folder, metrics = dialog(reward_model_path=None, dataset_name=data)
    assert "intent" not in metrics[0]
    assert metrics[0]["meteor"] == metrics[0]["objective/scores"]
    assert set(evaluation_of(folder)) == {"before", "after", "references", "n", "meteor"}
    assert not [name for name in evaluation_of(folder)["before"] if "intent" in name]
    assert "intent" not in rows_of(folder, "samples.jsonl")[0]


# ---- METEOR ------------------------------------------------------------------------------------------------


def fake_wordnet(**synonyms):
    """Like nltk.corpus.wordnet, with these words only."""

    def synsets(word):
        lemmas = [types.SimpleNamespace(name=functools.partial(str, name)) for name in synonyms.get(word, ())]
        return [types.SimpleNamespace(lemmas=lambda: lemmas)]

    return types.SimpleNamespace(synsets=synsets, ensure_loaded=lambda: None)


def raise_missing():
    raise LookupError("no such package")


def test_meteor_is_nltks(script, monkeypatch):
    """On nltk's words with Porter's stemmer. By hand: F * (1 - 0.5 (chunks / matches)^3), F weighs 1 to 9."""
    monkeypatch.setattr("nltk.corpus.wordnet", types.SimpleNamespace(ensure_loaded=raise_missing))
    assert script.load_wordnet()[1] == "exact and stem matches, WordNet is not installed"
    meteor = script.load_meteor()
    # One chunk of three matches, thanks to the stem.
    assert meteor("the cats sat", "the cat sat") == pytest.approx(1 - 0.5 * (1 / 3) ** 3)
    precision, recall = 2 / 2, 2 / 4
    f = 10 * precision * recall / (recall + 9 * precision)
    assert meteor("the cat sat here", "the cat") == pytest.approx(f * (1 - 0.5 * (1 / 2) ** 3))
    assert meteor("a great dog", "a big dog") == pytest.approx(2 / 3 * (1 - 0.5 * (2 / 2) ** 3))
    assert meteor("Yes.", "yes!") == pytest.approx(1 / 2 * (1 - 0.5 * (1 / 1) ** 3))
    assert meteor("Yes.", "") == 0


def test_meteor_with_wordnet(script, monkeypatch):
    """If WordNet is installed, synonyms match, and the run says so."""
    monkeypatch.setattr("nltk.corpus.wordnet", fake_wordnet(big=["huge", "great"]))
    assert script.load_wordnet()[1] == "exact, stem and WordNet synonym matches"
    meteor = script.load_meteor()
    assert meteor("a great dog", "a big dog") == pytest.approx(1 - 0.5 * (1 / 3) ** 3)


def test_words_of_several_sentences(script):
    """Periods inside a text are words too, as in nltk.word_tokenize; not those of numbers."""
    assert script.words_of("I see. That is 3.5 km... Why?") == "I see . That is 3.5 km ... Why ?".split()
    meteor = script.load_meteor()
    # Six matches in four chunks: "See you", ".", "No problem", ".".
    assert meteor("No problem. See you.", "See you. No problem.") == pytest.approx(1 - 0.5 * (4 / 6) ** 3)
    assert script.distinct_ngrams(["I see. You see."], 1) == 4 / 6


# ---- The final table ---------------------------------------------------------------------------------------

FOX = "The quick brown fox jumps over the lazy dog"
DOG = "The quick brown dog jumps on the log."


def test_text_metrics_of_published_examples(script):
    """rouge-score's README: ROUGE-1 12/17, ROUGE-L 10/17. sacrebleu's README: its three sentences."""
    metrics = script.text_metrics([DOG], [FOX])
    assert metrics["rouge1"] == pytest.approx(12 / 17)
    assert metrics["rougeLsum"] == pytest.approx(10 / 17)
    metrics = script.text_metrics([DOG, "Yes."], [FOX, "Yes."])
    assert metrics["rouge1"] == pytest.approx((12 / 17 + 1) / 2)  # the mean over answers, not over words
    assert script.text_metrics(["two dogs"], ["two dog"])["rouge1"] == 1  # stems
    assert set(script.text_metrics(["", ""], [DOG, FOX]).values()) == {0.0}

    answers = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."]
    references = ["The dog bit the man.", "It was not unexpected.", "The man bit him first."]
    precisions = [12 / 17, 6 / 14, 4 / 11, 3 / 8]  # of 1- to 4-grams; both sides have 17 words
    bleu = math.prod(precisions) ** 0.25
    assert script.text_metrics(answers, references)["sacrebleu"] == pytest.approx(bleu, rel=1e-6)


@pytest.mark.parametrize("prompt, reference", [(3, 400), (200, 100), (11, 5)])
def test_score_reference(script, tiny_lm, prompt, reference):
    """transformers' own loss of the reference, as far as the context of 256 tokens reaches."""
    model = AutoModelForCausalLM.from_pretrained(tiny_lm()).eval()
    ids = torch.randint(1000, [prompt + reference], generator=torch.Generator().manual_seed(0))
    turn = script.Turn({}, [], "", None, ids[:prompt].tolist(), ids[prompt:].tolist())
    ids = ids[:256]
    labels = ids.clone()
    labels[:prompt] = -100
    with torch.no_grad():
        loss = model(ids[None], labels=labels[None]).loss
    logprobs = script.score_reference(model, turn)
    assert len(logprobs) == len(ids) - prompt
    assert fmean(logprobs) == pytest.approx(-loss.item(), rel=1e-4)


def test_custom_metrics(talk, script, monkeypatch):
    """What the user's function returns is in log and table. Its turns and answers belong together."""
    calls = []

    def exact_answers(turns, answers):
        hits = [turn.reference == answer for turn, answer in zip(turns, answers, strict=True)]
        calls.append((len(hits), sum(hits) / len(hits)))
        return {"custom/exact": torch.tensor(sum(hits) / len(hits), dtype=torch.float64)}

    monkeypatch.setattr(script, "custom_metrics", exact_answers)
    _, folder, rows = talk(learning_rate=0.0, temperature=0.8, total_episodes=16)
    # Evaluation before, two updates, evaluation after, the references themselves.
    assert [count for count, _ in calls] == [4, 8, 8, 4, 4]
    shares = [share for _, share in calls]
    assert 0.5 < shares[1] < shares[4] == 1
    assert [row["custom/exact"] for row in rows] == shares[1:3]
    table = evaluation_of(folder)
    for column, share in (("before", shares[0]), ("after", shares[3]), ("references", shares[4])):
        assert table[column]["custom/exact"] == share
    assert "custom/questions" not in rows[0]
