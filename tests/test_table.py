"""The table: numbers are those of the files, blank where there is nothing to say, and readable for people."""

import math
import random
import re

import pytest
from results_folder import SACRE, result, scores, variant
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest

from lit_transformer.table import flops_by_time

pytestmark = pytest.mark.usefixtures("unplotted")


def number(text: str) -> float | None:
    return float(text) if text else None


# Numbers


def test_rows_stand_in_the_studys_order(whole):
    names = ["base", "one-head", "late", "half", "own", "broken"]
    assert list(whole.csv()) == names
    assert list(whole.table()) == names


@pytest.mark.parametrize(
    ("name", "seeds", "perplexity", "perplexity_sd", "bleu", "bleu_sd"),
    [
        ("base", 2, 11.0, 2**0.5, 21.5, 4.5**0.5),
        ("one-head", 2, 15.0, 0.5**0.5, 18.25, 0.125**0.5),
        ("half", 1, 11.25, None, 21.5, None),
        ("own", 1, 9.0, None, 25.0, None),
        ("late", 0, None, None, None, None),
        ("broken", 0, None, None, None, None),
    ],
)
def test_means_and_deviations_are_over_the_seeds_that_finished(
    whole, name, seeds, perplexity, perplexity_sd, bleu, bleu_sd
):
    row = whole.csv()[name]
    assert int(row["seeds"]) == seeds
    for column, value in {
        "perplexity": perplexity,
        "perplexity_sd": perplexity_sd,
        "bleu": bleu,
        "bleu_sd": bleu_sd,
        # To base over the same seeds: a difference of seeds must not look like one of rows.
        "perplexity_difference": None if perplexity is None else perplexity - {"half": 10, "own": 12}.get(name, 11),
        "bleu_difference": None if bleu is None else bleu - {"half": 20, "own": 23}.get(name, 21.5),
    }.items():
        assert number(row[column]) == (None if value is None else pytest.approx(value, rel=1e-12)), column


@pytest.mark.parametrize(
    ("name", "perplexity", "bleu"),
    [("base", 4.92, 25.8), ("one-head", 5.29, 24.9), ("late", 6.11, 23.7), ("half", 5.12, 25.4), ("own", None, None)],
)
def test_the_papers_figures_and_differences_are_the_papers_alone(whole, name, perplexity, bleu):
    row = whole.csv()[name]
    assert number(row["paper_perplexity"]) == perplexity
    assert number(row["paper_bleu"]) == bleu
    for column, value in (
        ("paper_perplexity_difference", perplexity and perplexity - 4.92),
        ("paper_bleu_difference", bleu and bleu - 25.8),
    ):
        assert number(row[column]) == (None if value is None else pytest.approx(value)), column


def test_the_table_for_people_shows_the_same_rounded(whole):
    table = whole.table()
    assert table["base"] == {
        "variant": "base",
        "sets": "",
        "PPL": "11.00 ± 1.41",
        "BLEU": "21.50 ± 2.12",
        "dPPL": "+0.00",
        "dBLEU": "+0.00",
        "p": "",
        "parameters": "1,234,567",
        "paper's row": "base",
        "paper PPL": "4.92",
        "paper BLEU": "25.8",
        "paper dPPL": "+0.00",
        "paper dBLEU": "+0.0",
    }
    assert list(table["one-head"].values()) == [
        "one-head", "num\\_heads=1", "15.00 ± 0.71", "18.25 ± 0.35", "+4.00", "-3.25", "", "1,234,567", "A-h1", "5.29",
        "24.9", "+0.37", "-0.9",
    ]  # fmt: skip
    assert table["half"]["sets"] == "d\\_ff=256, trainer.max\\_steps=9"
    assert table["half"]["parameters"] == "7,654,321"
    assert table["own"]["paper PPL"] == table["own"]["paper dBLEU"] == ""


def test_a_row_that_has_not_run_is_blank_beside_the_papers(whole):
    row, line = whole.csv()["late"], whole.table()["late"]
    ours = ("perplexity", "bleu", "compound_split_bleu", "parameters", "updates", "tgt_tokens", "flops", "hours")
    assert all(row[column] == "" for column in ours)
    assert [line[column] for column in ("PPL", "BLEU", "dPPL", "dBLEU", "parameters")] == [""] * 5
    assert (line["paper PPL"], line["paper dBLEU"]) == ("6.11", "-2.1")


def test_a_row_that_failed_says_why_in_place_of_numbers(whole):
    assert whole.csv()["broken"]["failed"] == "exit status 1: out of memory"
    assert "out of memory" in whole.table()["broken"]["PPL"]
    assert all(row["failed"] == "" for name, row in whole.csv().items() if name != "broken")


def test_a_seed_that_was_given_up_does_not_hide_behind_one_that_finished(folder):
    folder.study(variant("base", failed="exit status 1: out of memory"), seeds=(1, 2))
    folder.add(result("base", 1))
    folder.build()
    assert "out of memory" in folder.csv()["base"]["failed"]
    assert "out of memory" in folder.markdown


def test_a_failure_of_old_is_forgotten_once_all_seeds_have_finished(folder):
    folder.study(variant("base"), seeds=(1,))
    folder.add(result("base", 1))
    folder.build()
    assert folder.csv()["base"]["failed"] == ""
    assert "failed" not in folder.markdown


def test_without_base_there_are_no_differences_of_ours(folder):
    folder.study(variant("base"), variant("A-h1"))
    folder.add(scores("A-h1", 1, 15.0, 18.0))
    folder.build()
    row = folder.csv()["A-h1"]
    assert (row["perplexity"], row["perplexity_difference"], row["bleu_difference"]) == ("15.0", "", "")
    assert float(row["paper_bleu_difference"]) == pytest.approx(-0.9)


def test_differences_are_to_the_first_row_whatever_its_name(folder):
    folder.study(variant("A-h1"), variant("base"))
    folder.add(scores("A-h1", 1, 15.0, 18.0), scores("base", 1, 11.0, 21.0))
    folder.build()
    row = folder.csv()["base"]
    assert (float(row["perplexity_difference"]), float(row["bleu_difference"])) == (-4.0, 3.0)
    assert float(row["paper_bleu_difference"]) == pytest.approx(0.9)


def test_numbers_in_the_csv_are_those_of_the_files_to_the_last_digit(folder):
    exact = {"perplexity": 10.123456789012345, "hours": 1 / 3, "flops": 1.23456789e17, "tgt_tokens": 98765432109}
    exact |= {"parameters": 65123457, "vocab_size": 37001, "updates": 100000}
    folder.study(variant("base"))
    folder.add(result("base", 1, **exact, **{"bleu.score": 25.812345678901234}))
    folder.build()
    row = folder.csv()["base"]
    assert {key: type(value)(row[key]) for key, value in exact.items()} == exact
    assert float(row["bleu"]) == 25.812345678901234


@pytest.mark.parametrize("tiny", [-1e-9, -0.004, -0.0, 1e-9])
def test_a_difference_too_small_to_show_has_no_minus(folder, tiny):
    folder.study(variant("base"), variant("twin"))
    folder.add(scores("base", 1, 10.0, 20.0), scores("twin", 1, 10.0 + tiny, 20.0 + tiny))
    folder.build()
    twin = folder.table()["twin"]
    assert (twin["PPL"], twin["BLEU"], twin["dPPL"], twin["dBLEU"]) == ("10.00", "20.00", "+0.00", "+0.00")
    assert not re.search(r"-0\.0+\b", folder.markdown)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("seeds", [(1,), (1, 2)])
def test_a_run_that_diverged_is_said_to_be_so_and_differs_by_no_number(folder, value, seeds):
    folder.study(variant("base"), variant("hot"), seeds=seeds)
    folder.add(*(scores("base", seed, 10.0, 20.0) for seed in seeds))
    folder.add(*(scores("hot", seed, value if seed == 1 else 10.0, 0.0) for seed in seeds))
    folder.build()
    row = folder.csv()["hot"]
    assert (row["perplexity"], row["perplexity_difference"], row["bleu_difference"]) == (
        str(value), "", str({1: -20.0, 2: -20.0}[len(seeds)])
    )  # fmt: skip


def test_only_runs_of_the_study_are_in_its_table(folder):
    folder.study(variant("base"))
    folder.add(scores("base", 1, 10.0, 20.0), scores("base", 3, 99.0, 99.0), scores("gone", 1, 77.0, 77.0, data="x"))
    folder.build()
    assert list(folder.csv()) == ["base"]
    assert folder.csv()["base"]["seeds"] == "1"
    assert "99" not in folder.markdown and "77" not in folder.markdown


# The two kinds of BLEU


def test_the_two_kinds_of_bleu_never_share_a_column(folder):
    folder.study(variant("base"), variant("A-h1"))
    folder.add(
        result("base", 1, **{"bleu.score": 11.25, "compound_split_bleu.score": 71.5}),
        result("A-h1", 1, **{"bleu.score": 12.75, "compound_split_bleu.score": 72.5}),
    )
    folder.build()
    rows = folder.csv()
    assert [row["bleu"] for row in rows.values()] == ["11.25", "12.75"]
    assert [row["compound_split_bleu"] for row in rows.values()] == ["71.5", "72.5"]
    assert [row["paper_bleu"] for row in rows.values()] == ["25.8", "24.9"]
    for name, line in folder.table().items():
        others = {column: cell for column, cell in line.items() if column != "BLEU"}
        assert line["BLEU"] == f"{float(rows[name]['bleu']):.2f}"
        assert not any(rows[name]["compound_split_bleu"] in cell for cell in line.values())
        assert not any(line["BLEU"] == cell for cell in others.values())
    assert SACRE in folder.markdown
    assert "compounds split" in folder.markdown


# The table for people


@pytest.mark.parametrize("nasty", ["a | b", "`x`: 'y'", "snake_case __dunder__", '"quoted", comma', "a \\| b", "|"])
def test_reasons_and_values_with_marks_of_their_own_leave_the_tables_whole(folder, nasty):
    folder.study(
        variant("base", {"run.wandb_project": nasty}),
        variant("broken", {"run.wandb_project": nasty}, failed=f"exit status 1: {nasty}"),
        variant("late", {"run.wandb_project": nasty}),
    )
    folder.add(result("base"))
    folder.build()
    assert list(folder.table()) == ["base", "broken", "late"]
    assert folder.csv()["broken"]["failed"] == f"exit status 1: {nasty}"
    assert folder.csv()["late"]["set"] == f"run.wandb_project={nasty}"


def test_below_the_table_stands_what_it_was_made_from(whole):
    legend = "\n".join(line for line in whole.markdown.split("\n") if line.startswith("- "))
    for fact in (SACRE, "700 sentences", "valid split", "beam 4", "length penalty 0.6", "2,000", "no averaging"):
        assert fact in legend
    assert "0123456789abcdef" in legend and "fedcba9876543210" in legend
    assert "6 of 12 runs" in legend and "seeds 1, 2" in legend
    assert "9 or 1,500 updates" in legend


def test_a_study_without_any_result_says_so(folder):
    folder.study(variant("base"), variant("A-h1"))
    folder.build()
    assert "No run has finished yet" in folder.markdown
    assert list(folder.table()) == ["base", "A-h1"]
    assert {row["bleu"] for row in folder.csv().values()} == {""}


def test_the_papers_figures_beside_the_results_come_before_the_projects_own(folder):
    folder.study(variant("base"), variant("A-h1"))
    folder.out.mkdir()
    (folder.out / "paper_table3.csv").write_text("row,PPL,BLEU\nbase,2.00,50.0\nA-h1,3.00,\n")
    folder.build()
    row = folder.csv()["A-h1"]
    assert (row["paper_perplexity"], row["paper_perplexity_difference"]) == ("3.0", "1.0")
    assert (row["paper_bleu"], row["paper_bleu_difference"]) == ("", "")


# Compared with base

WORDS = "in the beginning god made heaven and earth light was good so it came to be".split()  # noqa: SIM905


def texts(seed: int, noise: float, n: int = 60) -> tuple[list[str], list[str]]:
    """Outputs that have this share of the references' words wrong, and the references."""
    references = [" ".join(random.Random(i).choices(WORDS, k=8)) for i in range(n)]
    rng = random.Random(1000 * seed + round(100 * noise))
    outputs = [" ".join("wrong" if rng.random() < noise else w for w in line.split()) for line in references]
    return outputs, references


@pytest.fixture
def compared(folder):
    """Two seeds each; `worse` is clearly worse, `same` writes the same as base, `old` kept no sentences."""
    folder.study(*map(variant, ("base", "worse", "same", "old", "alike")), seeds=(1, 2))
    for seed in (1, 2):
        folder.sentences(result("base", seed, device="Tesla P100-SXM2-16GB", processes=8), *texts(seed, 0.1), nll=2.0)
        folder.sentences(result("worse", seed, device="Tesla K80"), *texts(seed, 0.4), nll=4.0)
        folder.sentences(result("same", seed), *texts(seed, 0.1), nll=2.0)
        folder.sentences(result("alike", seed), *texts(seed + 10, 0.1), nll=2.0)
    folder.add(result("old", 1, **{"bleu.sentences": 60}))
    folder.build()
    return folder


def test_p_values_are_sacrebleus_and_corrected_for_the_rows_compared(compared):
    rows = compared.csv()
    hypotheses = {name: texts(1, noise)[0] + texts(2, noise)[0] for name, noise in (("base", 0.1), ("worse", 0.4))}
    references = texts(1, 0)[1] * 2
    _, found = PairedTest(list(hypotheses.items()), {"BLEU": BLEU()}, [references], test_type="bs")()
    assert float(rows["worse"]["p_value"]) == found["BLEU"][1].p_value
    assert float(rows["worse"]["p_holm"]) == pytest.approx(3 * found["BLEU"][1].p_value)
    assert float(rows["same"]["p_value"]) == float(rows["same"]["p_holm"]) == 1
    assert 0.05 < float(rows["alike"]["p_value"]) <= 1
    assert rows["base"]["p_value"] == rows["old"]["p_value"] == ""
    assert "bs:1000|seed:12345" in compared.markdown and "Holm-corrected for 3 rows" in compared.markdown


def test_intervals_hold_the_difference_and_are_nothing_for_the_same_outputs(compared):
    rows = compared.csv()
    worse = {key: number(value) for key, value in rows["worse"].items() if key.endswith(("low", "high", "difference"))}
    assert worse["bleu_low"] < worse["bleu_difference"] < worse["bleu_high"] < 0
    # Every sentence has an NLL of 2 or 4 nats over 4 tokens, so no resample differs.
    expected = math.exp(1) - math.exp(0.5)
    assert worse["perplexity_low"] == pytest.approx(expected) == worse["perplexity_high"]
    assert {rows["same"][key] for key in ("bleu_low", "bleu_high", "perplexity_low", "perplexity_high")} == {"0.0"}
    assert re.fullmatch(r"-\d+\.\d\d \(-\d+\.\d\d, -\d+\.\d\d\)", compared.table()["worse"]["dBLEU"])
    assert compared.table()["same"]["dBLEU"] == "+0.00 (+0.00, +0.00)"


def test_a_run_without_its_sentences_has_no_p_value_and_the_legend_says_why(compared):
    assert compared.table()["old"]["p"] == ""
    assert "old, for want of sentences.valid.jsonl" in compared.markdown
    assert compared.csv()["old"]["bleu_low"] == compared.csv()["old"]["seeds_compared"] == ""


def test_only_seeds_that_both_rows_have_are_compared(folder):
    folder.study(*map(variant, ("base", "half", "apart")), seeds=(1, 2, 3))
    for name, seeds in (("base", (1, 2)), ("half", (2, 3)), ("apart", (3,))):
        for seed in seeds:
            folder.sentences(result(name, seed), *texts(seed, 0.1))
    folder.build()
    rows = folder.csv()
    assert (rows["half"]["seeds"], rows["half"]["seeds_compared"], rows["half"]["p_value"]) == ("2", "1", "1.0")
    assert (rows["apart"]["seeds_compared"], rows["apart"]["p_value"]) == ("", "")
    assert "no seed in common with base: apart" in folder.markdown


def test_one_seed_is_enough_for_a_comparison(folder):
    folder.study(variant("base"), variant("other"))
    for name, noise in (("base", 0.1), ("other", 0.4)):
        folder.sentences(result(name), *texts(1, noise))
    folder.build()
    assert float(folder.csv()["other"]["p_value"]) < 0.05


@pytest.mark.parametrize("nll", [None, float("nan"), 1e6])
def test_a_perplexity_that_is_none_has_no_interval_but_bleu_has(folder, nll):
    folder.study(variant("base"), variant("hot"))
    folder.sentences(result("base"), *texts(1, 0.1))
    folder.sentences(result("hot", perplexity=None), *texts(1, 0.4), nll=nll)
    folder.build()
    row = folder.csv()["hot"]
    assert (row["perplexity"], row["perplexity_low"], row["perplexity_high"]) == ("inf", "", "")
    assert float(row["bleu_low"]) < float(row["bleu_high"])
    assert not any(value in ("inf", "nan") for key, value in row.items() if key != "perplexity")


def test_runs_of_one_fingerprint_but_other_references_are_refused(folder):
    folder.study(variant("base"), variant("other"))
    outputs, references = texts(1, 0.1)
    folder.sentences(result("base"), outputs, references)
    folder.sentences(result("other"), outputs, [*references[:7], "something else entirely", *references[8:]])
    with pytest.raises(ValueError, match=r"references differ from line 8 on"):
        folder.build()
    assert not folder.files()


# What it took


def test_flops_by_the_papers_formula_where_it_gives_the_devices_rate(compared):
    rows = compared.csv()
    assert float(rows["base"]["flops_by_time"]) == pytest.approx(0.25 * 3600 * 8 * 9.5e12)
    assert float(rows["worse"]["flops_by_time"]) == pytest.approx(0.25 * 3600 * 2.8e12)
    assert rows["same"]["flops_by_time"] == ""
    assert "blank for CPU, for which it gives none" in compared.markdown
    line = compared.table(1)["base"]
    assert (line["FLOPs"], line["FLOPs by time"]) == ("1.5e+12", "6.84e+16")
    assert (line["parameters"], line["vocabulary"]) == ("1,234,567", "2,000")
    assert (line["source tokens"], line["target tokens"]) == ("90,000", "80,000")
    assert line["device"] == "8 x Tesla P100-SXM2-16GB"


@pytest.mark.parametrize(
    ("device", "rate"),
    [("Tesla K80", 2.8), ("Tesla K40m", 3.7), ("Tesla M40 24GB", 6.0), ("Tesla P100-PCIE-16GB", 9.5)],
)
def test_the_papers_rates(device, rate):
    assert flops_by_time({"device": device, "processes": 2, "hours": 0.5}) == pytest.approx(rate * 3600e12)


@pytest.mark.parametrize("device", ["CPU", "NVIDIA H200", "Quadro P1000", "NVIDIA A40", "Quadro M4000", "", None])
def test_no_rate_is_guessed(device):
    assert flops_by_time({"device": device, "processes": 1, "hours": 1.0}) is None


def test_the_papers_formula_gives_the_papers_figure():
    """Table 2: base is 3.3e18 FLOPs, 12 hours on 8 P100."""
    assert flops_by_time({"device": "P100", "processes": 8, "hours": 12}) == pytest.approx(3.3e18, rel=0.01)


def test_only_rows_that_ran_are_in_what_it_took(whole):
    assert list(whole.table(1)) == ["base", "one-head", "half", "own"]


# Beyond the lengths trained on


@pytest.mark.parametrize("by_length", [True, False, None])
def test_scores_beyond_the_lengths_trained_on(folder, by_length):
    folder.study(variant("base"), variant("other"), **({} if by_length is None else {"by_length": by_length}))
    outputs, references = texts(1, 0.2)
    lengths = [10 + i for i in range(60)]  # with the end of sentence: 9 to 68 pieces
    nll = [float(i) for i in range(60)]
    for name in ("base", "other"):
        folder.sentences(result(name, max_length=50), outputs, references, src_tokens=lengths, nll=nll)
    folder.build()
    row = folder.csv()["base"]
    assert row["beyond_sentences"] == "18"  # 51 to 68
    assert float(row["beyond_bleu"]) == pytest.approx(BLEU().corpus_score(outputs[42:], [references[42:]]).score)
    assert float(row["beyond_perplexity"]) == pytest.approx(math.exp(sum(nll[42:]) / (18 * 4)))
    assert ("BLEU beyond" in folder.table()["base"]) == bool(by_length)
    assert ("more than 50 source pieces" in folder.markdown) == bool(by_length)


def test_no_sentence_beyond_leaves_blanks(folder):
    folder.study(variant("base"), by_length=True)
    folder.sentences(result("base", max_length=50), *texts(1, 0.2))
    folder.build()
    assert {folder.csv()["base"][f"beyond_{key}"] for key in ("sentences", "bleu", "perplexity")} == {""}
    assert "BLEU beyond" not in folder.table()["base"]


# Agreement with the paper


def test_agreement_is_over_the_rows_that_both_have_without_base(folder):
    names = ["base", "A-h1", "A-h4", "C-N2", "C-N4", "own"]  # the paper: -0.9, -0.3, -2.1, -0.5 BLEU
    folder.study(*map(variant, [*names, "C-N8"]), variant("again", paper="base"))
    ours = {"base": 20, "A-h1": 19, "A-h4": 19.8, "C-N2": 15, "C-N4": 19.5, "own": 99, "again": 50}
    folder.add(*(scores(name, 1, 100 - bleu, bleu) for name, bleu in ours.items()))
    folder.build()
    assert "BLEU +1.00, 95% interval +1.00 to +1.00 (4 rows)" in folder.markdown
    assert "perplexity +1.00" in folder.markdown  # 5.29, 5.00, 6.11, 5.19
    assert "1,500 updates, 80,000 target tokens" in folder.markdown


def test_agreement_over_fewer_rows_is_none(whole):
    assert "BLEU too few rows (2 rows)" in whole.markdown


# Rows given up


def test_a_long_reason_is_cut_in_the_table_for_people_alone(folder):
    reason = "exit status 1: " + "out | of\nmemory " * 30
    folder.study(variant("base"), variant("broken", failed=reason))
    folder.add(result("base"))
    folder.build()
    cell = folder.table()["broken"]["PPL"].replace("\\|", "|")
    assert cell.startswith("failed: exit status 1: out | of memory out") and cell.endswith("…")
    assert len(cell) <= len("failed: ") + 120
    assert folder.csv()["broken"]["failed"] == reason


def test_averaged_rows_are_named(folder):
    folder.study(variant("base"), variant("averaged"))
    folder.add(result("base"), result("averaged", averaged=["step-1.ckpt"]))
    folder.build()
    assert "averaged checkpoints in averaged alone" in folder.markdown
