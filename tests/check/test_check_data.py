"""Data files and rows: what is read, what is not, and what a row cannot be."""

import gzip
import json
import re

import datasets
import pytest
from check_helpers import assert_only, assert_remark, findings, texts
from run_tools import guesses, posts_of, write_rows

pytest_plugins = ["run_fixtures"]
LONG = "A warm and clever film about a lighthouse keeper who learns to dance. "


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def reviews(count, start=0):
    return [dict(text=f"{LONG} Number {i}.", label=i % 2) for i in range(start, start + count)]


@pytest.fixture
def look(scripts, small, tmp_path):
    """look(script="ppo_sentiment", **files) -> findings about a folder with these files"""

    def make(script="ppo_sentiment", flags=(), **files):
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            path = folder / name.replace("__", "-").replace("_", ".")
            text = content if isinstance(content, str) else lines(content)
            path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return findings(scripts[script], small(script, dataset_name=str(folder), **dict(flags)))

    return make


# ---- Files -------------------------------------------------------------------------------------------------


def test_two_writings_of_a_split(look):
    """train.csv may hold the same rows as train.jsonl, or others."""
    table = "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in reviews(5))
    assert_only(
        look(train_jsonl=reviews(5), train_csv=table, test_jsonl=reviews(3, 9)), "which file is train?"
    )


def test_a_shard_beside_the_whole(look):
    found = look(
        train_jsonl=reviews(5), train__00000__of__00001_jsonl=reviews(4, 5), test_jsonl=reviews(3, 9)
    )
    assert_only(found, "which file is train?", "train.jsonl")


def test_a_missing_shard(look):
    """-of- says how many there are."""
    found = look(train__00001__of__00003_jsonl=reviews(5), test_jsonl=reviews(3, 9))
    assert_only(found, "train-*-of-00003.jsonl", "1 of 3 parts")


@pytest.mark.parametrize(
    "names, word",
    [
        ("train-0.jsonl train-2.jsonl", "train-*.jsonl: number 1 is missing"),
        ("train-00000.jsonl train-00002.jsonl", "number 1 is missing"),
        ("train-part1.jsonl train-part3.jsonl", "number 2 is missing"),
        ("train-0-of-2-a09b74b3.jsonl", "1 of 2 parts"),  # push_to_hub wrote such names
        ("train-00003-of-00002.jsonl train-00004-of-00002.jsonl", "0 of 2 parts"),
        ("train-0-of-2.jsonl train-1-of-2.jsonl train-0-of-1.jsonl", "which file is train?"),
        ("train.jsonl train-extra.jsonl", "which file is train?"),
        ("train-0-of-1.jsonl train-old.jsonl", "which file is train?"),
        ("train-0.jsonl train-1.jsonl.zst", "train-1.jsonl.zst is not read"),
        ("train-0.jsonl train-1.jsonl.part", "train-1.jsonl.part is not read"),
        ("train-0.jsonl train-1.JSONL", "train-1.JSONL is not read"),
        ("train.jsonl train/1.jsonl", "train/1.jsonl is not read"),
        ("train.jsonl data/train-0.jsonl", "data/train-0.jsonl is not read"),
        ("train-0.jsonl train-1.jsonl", None),
        ("train.jsonl sft/train.jsonl", None),  # another data set
        ("train-1-of-2.jsonl train-2-of-2.jsonl", None),
        ("train-0-of-2-a09b74b3.jsonl train-1-of-2-1dc2ba3d.jsonl", None),
        ("train-a.jsonl train-d.jsonl", None),
        ("train-2023.jsonl train-2025.jsonl", None),
        ("train.jsonl logs/0/metrics.jsonl logs/2/metrics.jsonl", None),
    ],
)
def test_parts_by_their_names(look, tmp_path, names, word):
    for i, name in enumerate(names.split()):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(lines(reviews(5, 10 * i)))
    found = look(test_jsonl=reviews(3, 90))
    if word is None:
        assert texts(found) == []
    else:
        assert_only(found, word)


@pytest.mark.parametrize(
    "names, word",
    [
        ("data/train-0-of-3.parquet data/train-2-of-3.parquet", "train-*-of-3.parquet: 2 of 3 parts"),
        ("train/0-of-2.parquet", "train-*-of-2.parquet: 1 of 2 parts"),
        ("train/0.parquet train/2.parquet", "number 1 is missing"),
        ("data/train-0.parquet data/train-1.jsonl", "datasets reads files of one kind only"),
        ("data/train-0-of-2.parquet data/train-1-of-2.parquet", None),
    ],
)
def test_parts_below_the_folder(scripts, small, tmp_path, names, word):
    """datasets reads them."""
    test = "data/test-0-of-1.parquet" if "data" in names else "test/0.parquet"
    for i, name in enumerate([*names.split(), test]):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(reviews(5, 10 * i)).to_parquet(path)
    found = texts(
        findings(scripts["ppo_sentiment"], small("ppo_sentiment", dataset_name=str(tmp_path / "data")))
    )
    assert any(word in text for text in found) if word else not found, found


def test_a_data_set_on_disk(scripts, small, tmp_path):
    """Its own json files are no rows; a missing part is."""
    rows = datasets.Dataset.from_list(reviews(8))
    data = datasets.DatasetDict(train=rows, test=rows.select(range(2)))
    data.save_to_disk(str(tmp_path / "data"), num_shards=dict(train=2, test=1))
    args = small("ppo_sentiment", dataset_name=str(tmp_path / "data"))
    assert texts(findings(scripts["ppo_sentiment"], args)) == []
    (tmp_path / "data/train/data-00001-of-00002.arrow").unlink()
    assert_only(findings(scripts["ppo_sentiment"], args), "data-*-of-00002.arrow: 1 of 2 parts")


def test_one_part_as_a_data_set(scripts, small, tmp_path):
    path = tmp_path / "train-00000-of-00003.jsonl"
    path.write_text(lines(reviews(20)))
    found = findings(scripts["ppo_sentiment"], small("ppo_sentiment", dataset_name=str(path)))
    assert_remark(found, "is one of 3 parts")


def test_a_part_of_an_older_writing(look):
    """Once there were three parts, each with every third row. The new writing has two; the third remains."""
    rows = reviews(12)
    parts = dict(train__0_jsonl=rows[::2], train__1_jsonl=rows[1::2], train__2_jsonl=rows[2::3])
    assert_only(
        look(**parts, test_jsonl=reviews(3, 20)), "train-2.jsonl repeats rows of other files of train"
    )


def test_two_parts_with_one_number(look):
    """The second writing has another column, so no row is equal."""
    rows = [row | dict(source="x") for row in reviews(6)]
    parts = dict(train__0_jsonl=reviews(6)[:3], train__1_jsonl=reviews(6)[3:])
    parts |= dict(train__00_jsonl=rows[:4], train__01_jsonl=rows[4:])
    assert_only(look(**parts, test_jsonl=reviews(3, 20)), "train-*.jsonl: number 0 is there twice")


def test_rows_in_two_shards(look):
    """The second shard repeats two of three rows."""
    found = look(train__1_jsonl=reviews(5), train__2_jsonl=reviews(3, 3), test_jsonl=reviews(3, 9))
    assert_only(found, "train-2.jsonl repeats rows of other files of train")


@pytest.mark.parametrize("name", ["eval", "heldout", "test_sft"])
def test_a_held_out_file_with_another_name(scripts, small, tmp_path, name):
    """It would be ignored, and a tenth of train held out."""
    data = write_rows(tmp_path / "data", train=reviews(20), **{name: reviews(6, 30)})
    assert_only(
        findings(scripts["ppo_sentiment"], small("ppo_sentiment", dataset_name=data)),
        f"{name}.jsonl is not read",
        "rename it to test.jsonl",
    )


def test_a_file_that_nobody_needs(look):
    """A second held-out file is only mentioned."""
    found = look(train_jsonl=reviews(9), test_jsonl=reviews(3, 9), validation_jsonl=reviews(3, 20))
    assert_remark(found, "validation.jsonl is not read")


def test_a_line_that_is_not_json(look):
    found = look(train_jsonl=lines(reviews(2)) + '{"text": \n', test_jsonl=reviews(3, 9))
    assert any("data/train.jsonl, line 3" in text for text in texts(found)), texts(found)


@pytest.mark.parametrize("row, line", [("a, b,1", 3), ("alone", 3), ('"open', 3)])
def test_a_line_of_a_table(look, row, line):
    """A comma or a quote too many, or a cell too few."""
    found = look(train_csv=f"text,label\n{LONG},0\n{row}\n", test_jsonl=reviews(3, 9))
    assert any(f"data/train.csv, line {line}" in text for text in texts(found)), texts(found)


def test_a_table_with_semicolons(look):
    found = look(train_csv=f"text;label\n{LONG};0\n", test_jsonl=reviews(3, 9))
    assert any("has one column, 'text;label'" in text for text in texts(found))


def test_a_table_that_nobody_reads(look):
    """It may be of any form."""
    found = look(train_jsonl=reviews(9), test_jsonl=reviews(3, 20), raw_csv="text;label\na,b;0\n")
    assert_remark(found, "raw.csv is not read")


@pytest.mark.parametrize("name", ["rows.json", "train.json"])
def test_json_for_another_reader(scripts, small, tmp_path, name):
    """datasets would make a timestamp of the day."""
    (tmp_path / "data").mkdir()
    (tmp_path / f"data/{name}").write_text(lines(reviews(9)))
    found = findings(scripts["ppo_sentiment"], small("ppo_sentiment", dataset_name=str(tmp_path / "data")))
    assert len(texts(found)) >= 1
    assert any("train.jsonl" in text for text in texts(found)), texts(found)


def test_splits_of_another_name(scripts, small, tmp_path, monkeypatch):
    """A data set of the Hub has its own names."""
    parts = {
        name: datasets.Dataset.from_list(reviews(count)) for name, count in (("train", 9), ("test_sft", 4))
    }
    module = scripts["ppo_sentiment"]
    monkeypatch.setattr(module.datasets, "load_dataset", lambda *names: datasets.DatasetDict(parts))
    found = findings(module, small("ppo_sentiment", dataset_name="somebody/reviews"))
    assert_only(found, "the split test_sft is not read", "a random tenth")


@pytest.mark.parametrize("layout", ["", "data/"])
def test_parts_of_a_data_set_of_the_hub(scripts, small, tmp_path, layout):
    """Files whose names end in a hash. Those of train_sft and train_gen would be one split; one may miss."""
    folder = tmp_path / "hub" / layout
    folder.mkdir(parents=True)

    def look(**files):
        for path in folder.iterdir():
            path.unlink()
        for stem, rows in files.items():
            datasets.Dataset.from_list(rows).to_parquet(
                folder / f"{stem.replace('__', '-')}-3f2a99c1.parquet"
            )
        return findings(scripts["sft"], small("sft", dataset_name=str(tmp_path / "hub")))

    train, test = reviews(9), reviews(3, 20)
    found = look(train__00000__of__00001=train, test__00000__of__00001=test)
    assert texts(found) == []
    found = look(train__00000__of__00002=train, test__00000__of__00001=test)
    assert_only(found, "train-*-of-00002.parquet: 1 of 2 parts are there")
    names = ("train_gen", "train_sft", "test_gen", "test_sft")
    found = look(**{f"{name}__00000__of__00001": reviews(4, 5 * i) for i, name in enumerate(names)})
    said = "there are no training rows" if layout else "train_gen, train_sft are read as one split"
    assert said in " ".join(texts(found)), texts(found)


def test_where_the_training_rows_come_from(scripts, small, tmp_path):
    """Not from the held-out file."""
    for used, end in ((dict(), "name it train.jsonl"), (dict(train=reviews(9)), "come from train.jsonl")):
        data = write_rows(tmp_path / end, **used, train_sft=reviews(9, 40), test=reviews(3, 9))
        found = findings(scripts["ppo_sentiment"], small("ppo_sentiment", dataset_name=data))
        [said] = [text for text in texts(found) if "train_sft.jsonl is not read" in text]
        assert said.endswith(end)


# ---- Rows --------------------------------------------------------------------------------------------------


def test_all_prompts_are_too_long(look):
    """By how much? The tools and the template count, which the user did not write."""
    long, longer = (dict(prompt="a " * count, completion="b") for count in (70, 90))
    test = posts_of("test", 5)
    found = look("rloo_tldr", dict(max_prompt_length=60), train_jsonl=[longer, long], test_jsonl=test)
    [said] = [text for text in texts(found) if "no training row can be used" in text]
    [number] = re.findall(r"--max-prompt-length 60 tokens; the shortest has (\d+)", said)
    assert 60 < int(number) < 90


def test_rows_that_are_left_out(look):
    """Each reason with its number and its first row."""
    rows = [
        *posts_of("train", 9),
        dict(prompt=None, completion="a"),
        dict(prompt="long " * 99, completion="b"),
    ]
    found = look("rloo_tldr", dict(max_prompt_length=60), train_jsonl=rows, test_jsonl=posts_of("test", 5))
    assert_remark(found, "1 of 11 train rows are left out: no prompt", "train.jsonl row 10")
    assert_remark(
        found, "1 of 11 train rows are left out: more than --max-prompt-length 60", "train.jsonl row 11"
    )


def test_no_row_is_used(look):
    rows = [dict(review=LONG, stars=i) for i in range(8)]
    found = look(train_jsonl=rows, test_jsonl=rows)
    assert any("no training row can be used: no text" in text for text in texts(found))


def test_whitespace(look):
    rows = reviews(8) + [dict(text=" \n\t", label=1)]
    found = look(train_jsonl=rows, test_jsonl=reviews(3, 20))
    assert_remark(
        found, "1 of 12 rows have nothing (or only whitespace) in the column text", "train.jsonl row 9"
    )


def test_an_empty_column(look):
    rows = [row | dict(source="") for row in reviews(12)]
    assert_remark(look(train_jsonl=rows[:8], test_jsonl=rows[8:]), "the column source is empty in all rows")


def test_prompts_on_both_sides(look):
    """The evaluation would be too good."""
    train, test = posts_of("train", 9), posts_of("test", 4)
    found = look("rloo_tldr", train_jsonl=train, test_jsonl=[*test, train[2], train[5]])
    assert_remark(found, "2 of 6 held-out rows", "also in train", "test.jsonl row 5")


def test_training_rows_that_are_held_out(look):
    """Whole rows: an environment may say the same prompt first, whatever its secret is."""
    rows = [dict(prompt="Guess.", completion=f"It is {i}.") for i in range(6)]
    found = look("rloo_tldr", train_jsonl=rows[:4], test_jsonl=rows[2:])
    assert_remark(found, "4 of 4 held-out rows", "also in train")
    assert_remark(found, "2 of 4 held-out rows are training rows")


def test_repeated_held_out_prompts(look):
    test = posts_of("test", 4)
    found = look("rloo_tldr", train_jsonl=posts_of("train", 9), test_jsonl=test + test[:3])
    assert_remark(found, "the 7 held-out rows contain only 4 different values in the column prompt")


def test_tasks_of_an_environment(look, tmp_path):
    """Their prompts may be the same; the other columns make the difference."""
    rows = [dict(prompt="Guess.", secret=secret) for secret in range(20)]
    held_out = [*rows[8:10], *[dict(prompt="Guess.", secret=30)] * 2]
    flags = {name: value for name, value in guesses(tmp_path).items() if name != "dataset_name"}
    found = look("grpo_tools", flags, train_jsonl=rows[:9], test_jsonl=held_out)
    about = [text for text in texts(found, "remark") if "held-out rows" in text]
    assert about == [
        "1 of 4 held-out rows are also in train, such as test.jsonl row 1",
        "the 4 held-out rows contain only 3 different rows",
    ]


def test_columns_that_nobody_reads(look, tmp_path):
    """A function's parameters are read; one with only **columns may read anything."""
    rows = [dict(prompt=f"{i} + 1 =", answer=str(i + 1), instruction="Be short.") for i in range(30)]
    (tmp_path / "named.py").write_text(
        "def named(completions, answer, **columns):\n"
        "    return [float(x == y) for x, y in zip(completions, answer)]\n"
    )
    flags = dict(reward_fn=[f"{tmp_path}/named.py:named"])
    found = look("grpo_math", flags, train_jsonl=rows[:24], test_jsonl=rows[24:])
    assert_remark(found, "nobody reads these columns", "instruction")
    assert not any("answer" in text for text in texts(found, "remark") if "nobody reads" in text)


def test_a_function_that_may_read_anything(look):
    rows = [dict(prompt=f"{i} + 1 =", answer=str(i + 1)) for i in range(30)]
    found = look("grpo_math", train_jsonl=rows[:24], test_jsonl=rows[24:])  # letters(completions, **columns)
    assert not any("nobody reads" in text for text in texts(found, "remark"))


def test_two_kinds_of_columns(look):
    rows = [dict(text="A text.", completion="Another.", prompt="")] * 9
    found = look("sft", train_jsonl=rows, test_jsonl=rows[:2])
    assert any("train.jsonl row 1 has text and completion" in text for text in texts(found)), texts(found)


def test_less_data_than_a_batch(look):
    flags = dict(per_device_train_batch_size=16)
    found = look(flags=flags, train_jsonl=reviews(20), test_jsonl=reviews(3, 30))
    assert_remark(found, "an update takes 32 rows, and there are 20")


def test_rounded_epochs(look):
    """13 rows in batches of 8, one epoch: two updates of 8 are 1.2 epochs."""
    rows = [dict(prompt=f"Post {i}.", chosen=" good", rejected=" so bad") for i in range(18)]
    found = look(
        "dpo_tldr", dict(eval_dataset_name=None, judge_fn=None), train_jsonl=rows[:13], test_jsonl=rows[13:]
    )
    assert_remark(found, "--num-train-epochs 1 is rounded to whole updates of 8 rows: 1.2 epochs")


def test_rows_of_an_epoch(look):
    """Those that are used: not equal responses, nor rows of the other shard; of dialogs, the answers."""
    rows = [dict(prompt=f"Post {i}.", chosen=" good", rejected=" so bad") for i in range(18)]
    equal = [row | dict(rejected=" good") for row in rows]
    files = dict(train_jsonl=rows[:13] + equal, test_jsonl=rows[13:])
    flags = dict(per_device_train_batch_size=32)
    assert_remark(look("reward_model", flags, **files), "takes 32 rows, and there are 13")
    assert_remark(look("reward_model", flags | dict(train_shard="1/2"), **files), "and there are 6")
    dialogs = [dict(dialog=["Hm?", f"No {i}.", "So?"], act=[1, 2, 1]) for i in range(9)]
    files = dict(train_jsonl=dialogs, test_jsonl=dialogs[:2])
    assert_remark(look("reward_model", flags | dict(label_names="a,b"), **files), "there are 18")
    assert_remark(look("ppo_dialog", flags, **files), "and there are 18")


def test_packed_rows(look, scripts, small):
    """sft.py counts rows that hold several documents: twelve texts may be one or two rows."""
    sft, flags = scripts["sft"], dict(packing=True, max_length=200, num_train_epochs=1)
    texts_of = [dict(text=f"{LONG} Number {i}.") for i in range(12)]
    found = look("sft", flags, train_jsonl=texts_of, test_jsonl=texts_of[:2])
    args = small("sft", **flags)
    documents, _ = sft.load_documents(texts_of, sft.load_tokenizer(args.model_name_or_path), args)
    count = len(sft.pack(documents, 200, True))
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    assert 1 < count < batch < 12
    assert_remark(found, f"an update takes {batch} packed rows of 200 tokens, and there are {count}")
    assert_remark(found, f"--num-train-epochs 1 is rounded to whole updates of {batch} rows")


WORDS = "lighthouse keeper dances harbor winter letters garden bicycle thunder orchard river painter".split()


@pytest.mark.parametrize("shuffled", [None, "chosen", "rejected"])
def test_responses_of_other_prompts(look, shuffled):
    """The words say so, if the other column has those of its prompt."""
    rows = []
    for i in range(120):
        names = [f"{word}{i}" for word in WORDS]
        texts_of = {
            name: " ".join(names[k :: 3 - k]) + " indeed" for k, name in enumerate(("chosen", "rejected"))
        }
        rows.append(dict(prompt=" ".join(names), **texts_of))
    if shuffled:
        values = [row[shuffled] for row in rows]
        for row, value in zip(rows, values[7:] + values[:7]):
            row[shuffled] = value
    for name in ("reward_model", "dpo_tldr"):
        flags = dict(max_length=2000) | (
            dict(eval_dataset_name=None, judge_fn=None) if name[0] == "d" else {}
        )
        found = look(name, flags, train_jsonl=rows[:100], test_jsonl=rows[100:])
        said = [text for text in texts(found, "remark") if "was it shuffled?" in text]
        assert len(said) == (shuffled is not None), found
        assert not said or f"the column {shuffled} shares no more" in said[0]


@pytest.mark.parametrize("names, is_said", [("negative,positive", False), ("positive,negative", True)])
def test_names_of_labels_in_the_wrong_order(look, names, is_said):
    """Said if words that tell, in texts of both kinds, say the opposite."""
    moods = "A boring, awful film", "A great film, if dull at times: I loved it"
    rows = [dict(text=f"{moods[i % 2]}. Number {i}{' bad' * (i % 3 == 0)}.", label=i % 2) for i in range(90)]
    flags = dict(label_names=names)
    found = look("reward_model", flags, train_jsonl=rows[:60], test_jsonl=rows[60:])
    assert is_said == any("--label-names in the wrong order" in text for text in texts(found, "remark")), (
        found
    )


def test_prompts_that_are_cut(look):
    """By the token, through headers of a chat."""
    rows = [dict(prompt=f"{i} {LONG * 9}", chosen=" Yes.", rejected=" No.") for i in range(9)]
    flags = dict(max_length=40)
    found = look("reward_model", flags, train_jsonl=rows, test_jsonl=rows[:3])
    assert any("9 of 9 train examples: cut to --max-length 40" in text for text in texts(found, "remark")), (
        found
    )


def test_labels(look):
    """A label that is none of the classes, in the last row of train."""
    rows = reviews(9) + [dict(text=LONG, label=7)]
    found = look("reward_model", dict(label_names="bad,good"), train_jsonl=rows, test_jsonl=reviews(3, 20))
    assert any("train.jsonl row 10: label 7 is none of" in text for text in texts(found)), texts(found)


def test_scores_are_no_classes(look):
    rows = [dict(text=f"{LONG} {i}", label=i / 4) for i in range(9)]
    found = look("reward_model", train_jsonl=rows, test_jsonl=rows[:2])
    assert any("the column label has decimals" in text for text in texts(found)), texts(found)


def test_one_class(look):
    rows = [dict(text=f"{LONG} {i}", label=3) for i in range(9)]
    found = look("reward_model", train_jsonl=rows, test_jsonl=rows[:2])
    assert any("fewer than two different values" in text for text in texts(found)), texts(found)


def test_an_act_that_the_classifier_does_not_know(look):
    good, bad = dict(dialog=["Hello.", "Hi."], act=[1, 2]), dict(dialog=["Hello.", "Hi."], act=[1, 5])
    found = look("ppo_dialog", train_jsonl=[good] * 9, test_jsonl=[good, bad])
    assert any("test.jsonl row 2: act 5, but the classifier knows 1 to 4" in text for text in texts(found))


# ---- Preferences -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dpo_tldr", "reward_model"])
def test_a_prompt_in_its_responses(look, name):
    """It would be read twice."""
    rows = [dict(prompt=f"Post {i}.", chosen=f"Post {i}. Good", rejected=f"Post {i}. Bad") for i in range(12)]
    flags = dict(eval_dataset_name=None, judge_fn=None) if name == "dpo_tldr" else {}
    found = look(name, flags, train_jsonl=rows[:9], test_jsonl=rows[9:])
    assert any("12 of 12 rows repeat their prompt" in text for text in texts(found)), texts(found)


def test_a_prompt_in_another_column(look):
    rows = [
        dict(question=f"Who is {i}?", chosen=f"{i} is a king.", rejected=f"No idea, {i}.") for i in range(12)
    ]
    found = look("reward_model", train_jsonl=rows[:9], test_jsonl=rows[9:])
    assert any("no column prompt" in text and "rename one of question" in text for text in texts(found))


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_prompt_in_another_column_of_responses_that_begin_alike(look, is_chat):
    """What they share is no prompt."""
    rows = []
    for i in range(12):
        question = f"How much is {i} plus {i}?"
        question = [dict(role="user", content=question)] if is_chat else question
        rows.append(
            dict(messages=question, chosen=f"<answer>{2 * i}</answer>", rejected=f"<answer>{i}1</answer>")
        )
    found = look("reward_model", train_jsonl=rows[:9], test_jsonl=rows[9:])
    assert any("no column prompt" in text and "rename one of messages" in text for text in texts(found))


def test_chats_without_a_question(look):
    """Two answers of the assistant, and nothing that they answer."""
    good, bad = [[dict(role="assistant", content=text)] for text in ("Yes.", "No.")]
    found = look("reward_model", train_jsonl=[dict(chosen=good, rejected=bad)] * 9, test_jsonl=[])
    assert any("no column prompt" in text for text in texts(found)), texts(found)


@pytest.mark.parametrize("name", ["rloo_tldr", "sft"])
def test_completions_that_begin_with_their_prompt(look, name):
    rows = [dict(prompt=f"Post {i}.", completion=f"Post {i}. Short.") for i in range(12)]
    found = look(name, train_jsonl=rows[:9], test_jsonl=rows[9:])
    assert_only(found, "12 of 12 completions begin with their prompt")


def test_data_without_completions(scripts, small, tmp_path):
    """For samples of dpo_tldr.py, and for a judge."""
    rows = [dict(prompt=f"Post {i}.", completion="") for i in range(12)]
    data = write_rows(tmp_path / "data", train=rows[:9], test=rows[9:])
    found = findings(scripts["dpo_tldr"], small("dpo_tldr", eval_dataset_name=data, judge_fn=None))
    assert any("no row has a prompt and a completion" in text for text in texts(found)), texts(found)
    judge = small("grpo_math").reward_fn[0]
    found = findings(scripts["rloo_tldr"], small("rloo_tldr", dataset_name=data, judge_fn=judge))
    assert any("a judge needs references" in text for text in texts(found)), texts(found)


def test_texts_that_hold_their_prompt(look):
    """As in hh-rlhf: the beginning that they share is the prompt."""
    start = "\n\nHuman: Who is number {}?\n\nAssistant:"
    rows = [
        dict(chosen=start.format(i) + " A king.", rejected=start.format(i) + " Who knows.") for i in range(12)
    ]
    assert texts(look("reward_model", train_jsonl=rows[:9], test_jsonl=rows[9:])) == []


def test_equal_responses(look):
    rows = [
        dict(prompt=f"Post {i}.", chosen=" good", rejected=" good" if i == 3 else " bad") for i in range(12)
    ]
    found = look("reward_model", train_jsonl=rows[:9], test_jsonl=rows[9:])
    assert_remark(found, "1 rows have equal responses", "train.jsonl row 4")


@pytest.mark.parametrize("name", ["dpo_tldr", "reward_model"])
@pytest.mark.parametrize("count, kind", [(1, "error"), (3, "error"), (0, None)])
def test_pairs_both_ways_round(look, name, count, kind):
    """What one row teaches, the other one unteaches."""
    rows = [dict(prompt=f"Post {i}.", chosen=f" good {i}", rejected=f" bad {i}") for i in range(12)]
    for i in range(count):
        rows[6 + i] = rows[i] | dict(chosen=rows[i]["rejected"], rejected=rows[i]["chosen"])
    flags = dict(eval_dataset_name=None, judge_fn=None) if name == "dpo_tldr" else {}
    found = look(name, flags, train_jsonl=rows[:9], test_jsonl=rows[9:])
    if kind is None:
        assert texts(found) == []
    else:
        text = f"{count} of 12 rows contradict another one"
        assert_only(found, text, "train.jsonl row 1 and train.jsonl row 7")


def test_one_pair_of_many_both_ways_round(look):
    """People disagree now and then."""
    rows = [dict(prompt=f"Post {i}.", chosen=f" good {i}", rejected=f" bad {i}") for i in range(60)]
    rows[50] = rows[3] | dict(chosen=rows[3]["rejected"], rejected=rows[3]["chosen"])
    found = look("reward_model", train_jsonl=rows, test_jsonl=[rows[4] | dict(prompt="Another post.")])
    assert_remark(found, "1 of 61 rows contradict another one", "train.jsonl row 4 and train.jsonl row 51")


def test_responses_of_two_kinds(look):
    answer = [dict(role="assistant", content="Me.")]
    rows = [dict(prompt="Who?", chosen=" Me.", rejected=" You.")] * 9
    rows[4] = dict(prompt="Who?", chosen=answer, rejected=" You.")
    found = look("reward_model", train_jsonl=rows, test_jsonl=rows[:2])
    assert any("some responses" in text for text in texts(found)), texts(found)


ANSWERS = [[dict(role="assistant", content=text)] for text in ("Yes.", "No.")]
SYSTEM, USER = dict(role="system", content="Be short."), dict(role="user", content="Really?")


@pytest.mark.parametrize("start", [[USER], [SYSTEM, USER]])
def test_a_question_in_prompt_and_responses(look, start):
    """It would be read twice, also after a system message."""
    chosen, rejected = [start + answer for answer in ANSWERS]
    rows = [dict(prompt=[USER], chosen=chosen, rejected=rejected)] * 9
    found = look("reward_model", train_jsonl=rows, test_jsonl=rows[:2])
    assert any("train.jsonl row 1: the responses contain their prompt" in text for text in texts(found))


def test_one_chat_without_a_question(look):
    """Its question is in another column. That the other rows hold theirs does not help this one."""
    whole, alone = [
        dict(question="Really?", chosen=start + ANSWERS[0], rejected=start + ANSWERS[1])
        for start in ([USER], [])
    ]
    found = look("reward_model", train_jsonl=[whole] * 8 + [alone], test_jsonl=[whole] * 2)
    assert any("no column prompt" in t and "train.jsonl row 9" in t for t in texts(found)), texts(found)


@pytest.mark.parametrize("flag", ["center_dataset_name", "eval_dataset_name"])
def test_completions_of_another_data_set(scripts, small, tmp_path, flag):
    """They begin with their prompt, or are all too long, or there are none."""
    pairs = [dict(prompt=f"Post {i}.", chosen=" good", rejected=" so bad") for i in range(12)]
    name, flags = (
        "reward_model",
        dict(dataset_name=write_rows(tmp_path / "pairs", train=pairs, test=pairs[:4])),
    )
    if flag == "eval_dataset_name":
        name, flags = "dpo_tldr", flags | dict(judge_fn=None)
    rows = [dict(prompt=f"Post {i}.", completion=f"Post {i}. Short.") for i in range(6)]
    data = write_rows(tmp_path / "repeated", train=rows, test=rows)
    found = findings(scripts[name], small(name, **flags, **{flag: data}))
    assert_only(found, f"--{flag.replace('_', '-')}: 6 of 6 completions begin with their prompt")
    data = write_rows(tmp_path / "other", train=pairs, test=pairs)
    found = findings(scripts[name], small(name, **flags, **{flag: data}))
    assert_only(found, f"--{flag.replace('_', '-')} {data}: no row has a prompt and a completion")
    if name == "dpo_tldr":
        rows = [dict(prompt="long " * 300, completion=" Short.")]
        data = write_rows(tmp_path / "long", train=rows, test=rows)
        found = findings(scripts[name], small(name, **flags, eval_dataset_name=data))
        assert_only(found, f"--eval-dataset-name {data}: no row has", "250 tokens")


def test_acts_without_a_name(look):
    """reward_model.py would end with a KeyError. The first utterance is no answer: its act is not read."""
    good, bad = dict(dialog=["Hello.", "Hi."], act=[9, 2]), dict(dialog=["Hello.", "Hi."], act=[1, 3])
    flags = dict(label_names="inform,question")
    assert texts(look("reward_model", flags, train_jsonl=[good] * 9, test_jsonl=[good])) == []
    found = look("reward_model", flags, train_jsonl=[good] * 9, test_jsonl=[good, bad])
    assert_only(found, "test.jsonl row 2: act 3, but the classifier knows 1 to 2 (inform, question)")


@pytest.mark.parametrize("names", ["inform,inform", "inform"])
def test_equal_names_of_acts(look, names):
    rows = [dict(dialog=["Hello.", "Hi."], act=[1, 1])] * 9
    found = look("reward_model", dict(label_names=names), train_jsonl=rows, test_jsonl=rows[:2])
    assert_only(found, f"--label-names {names}: two labels or more")


def test_a_label_of_the_held_out_rows_only(look):
    """It has no class: these are the labels of the training rows."""
    rows = [dict(text=f"{LONG} {i}", label=["bad", "good"][i % 2]) for i in range(9)]
    found = look("reward_model", train_jsonl=rows, test_jsonl=[rows[0], dict(text=LONG, label="great")])
    assert_only(found, "test.jsonl row 2: label 'great' is none of")


def test_labels_of_two_types(look):
    rows = [dict(text=f"{LONG} {i}", label=["1", 0][i % 2]) for i in range(9)]
    found = look("reward_model", train_jsonl=rows, test_jsonl=rows[:2])
    assert_only(found, "the column label has values of several types")


def test_uneven_labels(look):
    rows = [dict(text=f"{LONG} {i}", label=int(i == 0)) for i in range(99)]
    found = look("reward_model", dict(num_eval_prompts=2), train_jsonl=rows, test_jsonl=rows[1:3])
    assert_remark(found, "rows per label are uneven: {'0': 100, '1': 1}")


def test_no_training_rows(look):
    found = look("ppo_sentiment", train_jsonl="\n", test_jsonl=reviews(3))
    assert any("there are no training rows" in text for text in texts(found)), texts(found)


def test_a_prompt_that_is_not_read(look):
    """The responses share a beginning, so there is a prompt; perhaps the column was meant."""
    start = "\n\nHuman: Who is number {}?\n\nAssistant:"
    rows = [
        dict(context="A game.", chosen=start.format(i) + " A king.", rejected=start.format(i) + " Who knows.")
        for i in range(12)
    ]
    found = look("reward_model", train_jsonl=rows[:9], test_jsonl=rows[9:])
    assert_remark(found, "the beginning that the responses share; context are not read")


def test_the_turn_of_a_dialog(look, tmp_path):
    rows = [dict(dialog=["Hello.", "Hi."], act=[1, 2], turn=3)] * 9
    (tmp_path / "ones.py").write_text("def ones(prompts, **columns):\n    return [1.0] * len(prompts)\n")
    found = look(
        "ppo_dialog", dict(reward_fn=[f"{tmp_path}/ones.py:ones"]), train_jsonl=rows, test_jsonl=rows[:2]
    )
    assert_remark(found, "the column turn is replaced")


def test_two_kinds_of_preferences_in_one_row(scripts, small, tiny_pairs, tmp_path):
    rows = [
        dict(prompt=f"{i}?", chosen=" Yes.", rejected=" No.", responses=[" No.", " Yes."]) for i in range(9)
    ]
    data = write_rows(tmp_path / "data", train=rows, test=rows)
    found = findings(scripts["dpo_tldr"], small("dpo_tldr", dataset_name=data, eval_dataset_name=None))
    assert_remark(found, "18 rows have chosen and responses (train.jsonl row 1): chosen is read")
