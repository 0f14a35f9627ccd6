"""docs/debugging.md: its changes of lines, quotes and ranges are those of the scripts and the runs.

Entries of grpo_tools.py are in docs/grpo_tools.md.
"""

import json
import re
import sys
from statistics import fmean

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import gallery  # noqa: E402
from archive import read_rows  # noqa: E402

import report  # noqa: E402

PAGE = (ROOT / "docs/debugging.md").read_text()
TOOLS_PAGE = (ROOT / "docs/grpo_tools.md").read_text()
MADE = [entry for entry in gallery.ENTRIES if not entry.existing]


SECTIONS = dict(re.findall(r'<a id="([^"]+)"></a>\n+(.*?)(?=<a id=|\Z)', PAGE + TOOLS_PAGE, re.S))


@pytest.mark.parametrize("entry", gallery.ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_has_its_change_and_its_response(entry):
    """The lines that made the fault; and the quoted response is in the samples of the run."""
    section = SECTIONS[entry.name]
    assert gallery.the_line(entry) in section and f"gallery/{entry.name}.png" in section
    run = gallery.run_of(entry)
    for update, score, _, response in re.findall(
        r"^Update (\d+), score (\S+): \*(.*?)\* \*\*(.*)\*\*$", section, re.M
    ):
        rows = report.read_lines(run.folder, "samples.jsonl")
        found = [row for row in rows if row["update"] == int(update) and f"{row['score']:.2f}" == score]
        assert any(" ".join(row["response"].split()).startswith(response) for row in found), response
    for update, score, lines in re.findall(r"^Update (\d+), score (\S+):\n\n((?:    .*\n)+)", section, re.M):
        rows = report.read_lines(run.folder, "samples.jsonl")
        response = "".join(line.removeprefix("    ") for line in lines.splitlines(keepends=True)).rstrip("\n")
        assert (int(update), float(score), response) in [
            (row["update"], round(row["score"], 4), row["response"]) for row in rows
        ]


def test_the_kl_that_an_entry_names_is_that_of_the_last_update():
    kls = {}
    for entry in gallery.ENTRIES:
        for number in re.findall(r"[Tt]he KL (?:goes to|is at) (\d+)", SECTIONS[entry.name]):
            kls[entry.name] = float(number), gallery.run_of(entry).metrics[-1]["objective/kl"]
    assert len(kls) == 4
    for named, last in kls.values():
        assert named == pytest.approx(last, rel=0.02)


def test_what_entries_say_in_words():
    """Numbers of the runs behind sentences like "from update 30 on"."""
    texts = {name: " ".join(section.split()) for name, section in SECTIONS.items()}
    runs = {entry.name: gallery.run_of(entry).metrics for entry in MADE}

    def values(name, metric):
        return [row[metric] for row in runs[name]]

    name = "learning-rate-too-high"
    band = json.loads((ROOT / "reference_bands.json").read_text())["ppo_sentiment tiny"]["metrics"]
    band = band["objective/scores"]
    healthy = max(high for update, high in zip(band["update"], band["95"]) if update <= 60)
    assert "In twelve updates the score rises higher than in sixty healthy ones" in texts[name]
    assert max(values(name, "objective/scores")[:12]) > healthy
    assert "but the KL is above 30" in texts[name] and values(name, "objective/kl")[11] > 30
    assert "the variance of the ratio begins in the thousands" in texts[name]
    assert 1_000 < values(name, "val/ratio_var")[0] < 10_000
    assert "from update 30 on, nearly all responses are empty" in texts[name]
    assert max(values(name, "completions/mean_length")[29:]) < 1.2
    assert max(values(name, "policy/entropy_avg")[29:]) < 0.1

    first, *_, last = entropy = values("kl-sign", "policy/entropy_avg")
    assert "the entropy doubles, then falls again" in texts["kl-sign"]
    assert max(entropy) > 2 * first and last < 1.1 * first
    assert "differ by 0.7 nats per token" in texts["dropout-on"]
    assert fmean(values("dropout-on", "sampling/logprob_gap_mean")) == pytest.approx(0.7, abs=0.05)
    assert "Four of five groups have equal rewards from the start" in texts["equal-groups"]
    assert fmean(values("equal-groups", "frac_reward_zero_std")[:10]) == pytest.approx(0.8, abs=0.05)
    scores = values("equal-groups", "objective/scores")
    assert "and the score rises" in texts["equal-groups"] and scores[-1] > 2 * scores[0]


def test_every_finding_of_the_report_has_a_section():
    """report.py links to docs/debugging.md#ENTRY. A run that the section names has this finding."""
    entries = {entry for _, _, entry in report.CHECKS.values()} | {"flags"}
    runs = {entry.name: entry for entry in gallery.ENTRIES}
    assert entries == set(SECTIONS) - set(runs)
    for entry in entries:
        for name in re.findall(r"^Seen in: \[.*\]\(#(.*)\)\.$", SECTIONS[entry], re.M):
            findings = report.find_problems(gallery.run_of(runs[name]))
            assert entry in [finding.entry for finding in findings], (entry, name)


def test_the_readme_counts_the_runs():
    count = sum(entry.script != "grpo_tools" for entry in gallery.ENTRIES)
    assert f"has {count} runs" in (ROOT / "README.md").read_text()


def test_the_ranges_are_those_of_the_healthy_runs():
    """Of each metric in the tables, at three times."""
    bands = json.loads((ROOT / "reference_bands.json").read_text())
    tables = re.findall(r"^\*\*`(\w+)\.py`\*\*\n\n((?:\|.*\n)+)", PAGE, re.M)
    assert [script for script, _ in tables] == ["ppo_sentiment"]
    for script, table in tables:
        band = bands[f"{script} tiny"]["metrics"]
        head, _, *lines = [[x.strip() for x in line.strip("| ").split(" | ")] for line in table.splitlines()]
        assert len(lines) >= 5
        for name, *cells, _ in lines:
            metric = band[name.strip("`")]
            for column, cell in zip(head[1:4], cells, strict=True):
                i = metric["update"].index(int(column.removeprefix("update ")))
                low, high = metric["5"][i], metric["95"][i]
                assert cell == (f"{low:.3g} to {high:.3g}" if low < high else f"{low:.3g}"), name


@pytest.mark.parametrize("entry", MADE, ids=lambda entry: entry.name)
def test_the_fault_fits_the_script(entry):
    """Its text is in the script, so the run can be made again; the committed run is of this length."""
    compile(gallery.faulty_source(entry), entry.script, "exec")
    run = gallery.run_of(entry)
    assert run.metrics[-1]["update"] <= entry.updates
    assert (ROOT / f"docs/gallery/{entry.name}.png").exists()


@pytest.mark.parametrize(
    "script", ["ppo_sentiment", "ppo_dialog", "rloo_tldr", "grpo_math", "reward_model", "sft", "dpo_tldr"]
)
def test_no_alarm_in_healthy_runs(script):
    """Each of ten seeds, against the band of the other nine. One seed may well be outside of all others."""
    import reference_bands

    alarms = []
    for seed in reference_bands.SEEDS:
        band = reference_bands.band(script, [other for other in reference_bands.SEEDS if other != seed])
        run = report.Run(
            folder=ROOT,
            name=f"seed {seed}",
            script=script,
            args=band["args"],
            about={},
            metrics=read_rows(reference_bands.run_path(script, seed), "metrics.jsonl"),
            evaluation={},
            pairs=[],
            tokens=[],
            band=band["metrics"],
            band_args=band["args"],
        )
        assert run.metrics
        alarms += report.find_problems(run)[:1]
    assert len(alarms) <= 1
