"""docs/debugging.md: it is what benchmarks/gallery.py writes from the committed runs."""

import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import gallery  # noqa: E402

PAGE = (ROOT / "docs/debugging.md").read_text()
MADE = [entry for entry in gallery.ENTRIES if not entry.existing]


def test_the_page_is_that_of_the_program():
    assert gallery.page() == PAGE
    assert f"has {len(gallery.ENTRIES)} runs" in (ROOT / "README.md").read_text()


def test_every_finding_of_the_report_has_an_entry():
    """report.py links to docs/debugging.md#ENTRY."""
    import report

    entries = {entry for _, _, entry in report.CHECKS.values()} | {"flags"}
    assert entries == set(gallery.SYMPTOMS)
    assert all(f'<a id="{entry}"></a>' in PAGE for entry in entries)


@pytest.mark.parametrize("entry", MADE, ids=lambda entry: entry.name)
def test_the_fault_fits_the_script(entry):
    """Its text is in the script, so the run can be made again; the committed run is of this length."""
    compile(gallery.faulty_source(entry), entry.script, "exec")
    run = gallery.run_of(entry)
    assert run.metrics[-1]["update"] <= entry.updates
    assert (ROOT / f"docs/gallery/{entry.name}.png").exists()


@pytest.mark.parametrize("script", ["ppo_sentiment", "ppo_dialog", "rloo_tldr", "grpo_math", "reward_model"])
def test_no_alarm_in_healthy_runs(script):
    """Each of ten seeds, against the band of the other nine. One seed may well be outside of all others."""
    import reference_bands

    import report

    alarms = []
    for seed in reference_bands.SEEDS:
        path = reference_bands.run_path(script, seed)
        band = reference_bands.band(script, [other for other in reference_bands.SEEDS if other != seed])
        run = report.Run(
            folder=path.parent,
            name=f"seed {seed}",
            script=script,
            args=band["args"],
            about={},
            metrics=report.read_lines(path.parent, path.name.removesuffix(".gz")),
            evaluation={},
            pairs=[],
            tokens=[],
            band=band["metrics"],
            band_args=band["args"],
        )
        assert run.metrics
        alarms += report.find_problems(run)[:1]
    assert len(alarms) <= 1
