"""Results: tables and plots say what the files of finished runs say, of runs that can be compared, and nothing else."""

import csv
import json
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lit_transformer import results
from lit_transformer.__main__ import main
from lit_transformer.results import build

SACRE = "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0"
SPLIT = "nrefs:1|case:mixed|eff:no|tok:moses-en-0.1.1+compounds|smooth:none|version:2.6.0"
ENDINGS = ("csv", "md", "png")


def result(variant: str, seed: int = 1, **fields) -> dict:
    """A result.json; keys with dots reach inside, as in {"bleu.score": 3}."""
    found = {
        "study": "s",
        "variant": variant,
        "seed": seed,
        "updates": 1500,
        "averaged": [],
        "parameters": 1234567,
        "vocab_size": 2000,
        "split": "valid",
        "nll": 2.0,
        "perplexity": 7.389,
        "tokens": 4000,
        "unfinished": 0,
        "bleu": {"name": "sacreBLEU", "score": 10.0, "signature": SACRE, "sentences": 700, "note": ""},
        "compound_split_bleu": {
            "name": "compound-split BLEU",
            "score": 90.0,
            "signature": SPLIT,
            "sentences": 700,
            "note": "",
        },
        "chrf": {"name": "chrF", "score": 30.0, "signature": "chrF2", "sentences": 700, "note": ""},
        "beam_size": 4,
        "length_penalty": 0.6,
        "data": "0123456789abcdef",
        "tokenizer": "fedcba9876543210",
        "src_tokens": 90000,
        "tgt_tokens": 80000,
        "epochs": 1.5,
        "flops": 1.5e12,
        "hours": 0.25,
        "device": "CPU",
        "processes": 1,
    }
    for key, value in fields.items():
        *path, last = key.split(".")
        part = found
        for name in path:
            part = part[name]
        part[last] = value
    return found


def scores(variant: str, seed: int, perplexity: float, bleu: float, **fields) -> dict:
    return result(variant, seed, perplexity=perplexity, **{"bleu.score": bleu}, **fields)


def variant(name: str, changes: dict | None = None, paper: str = "", failed: str = "") -> dict:
    return {"name": name, "set": changes or {}, "paper": paper or name, "failed": failed}


class Folder:
    """runs/s with its study and hand-made results, and what is built from it."""

    def __init__(self, root: Path) -> None:
        self.runs, self.out = root / "runs", root / "results"

    def study(self, *variants: dict, seeds: tuple[int, ...] = (1,)) -> None:
        (self.runs / "s").mkdir(parents=True, exist_ok=True)
        described = {"name": "s", "seeds": list(seeds), "variants": list(variants), "resolved": {}}
        (self.runs / "s" / "study.json").write_text(json.dumps(described), encoding="utf-8")

    def add(self, *found: dict) -> None:
        for one in found:
            file = self.runs / "s" / one["variant"] / f"seed{one['seed']}" / "result.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(one), encoding="utf-8")

    def build(self) -> None:
        self.markdown = build(self.runs, "s", self.out)

    def csv(self) -> dict[str, dict[str, str]]:
        with open(self.out / "s.csv", newline="", encoding="utf-8") as file:
            return {row["variant"]: row for row in csv.DictReader(file)}

    def table(self) -> dict[str, dict[str, str]]:
        """The rows of the Markdown table, which must have as many cells as its head."""
        text = (self.out / "s.md").read_text(encoding="utf-8")
        lines = [line for line in text.split("\n") if line.startswith("|")]
        head, rule, *rows = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines)
        assert all(re.fullmatch(r"-{3,}:?", cell) for cell in rule)
        assert len(head) == len(set(head))
        assert all(len(row) == len(head) for row in (rule, *rows))
        start = text.index(lines[0])
        assert text[start:].startswith("\n".join(lines) + "\n\n"), "the table is one block with a blank line after it"
        return {row[0]: dict(zip(head, row, strict=True)) for row in rows}

    def files(self) -> dict[str, bytes]:
        found = self.out.iterdir() if self.out.is_dir() else ()
        return {file.name: file.read_bytes() for file in found if "lock" not in file.name}


@pytest.fixture
def folder(tmp_path) -> Folder:
    return Folder(tmp_path)


@pytest.fixture
def whole(folder) -> Folder:
    """Rows of every kind: two seeds, one seed, none, one that the paper does not have, one that failed."""
    folder.study(
        variant("base"),
        variant("one-head", {"num_heads": 1}, "A-h1"),
        variant("late", {"num_layers": 1}, "C-N2"),
        variant("half", {"d_ff": 256, "trainer.max_steps": 9}, "C-ff1024"),
        variant("own", {"warmup": 8}),
        variant("broken", {"d_model": 4096}, "C-d1024", "exit status 1: out of memory"),
        seeds=(1, 2),
    )
    folder.add(
        scores("base", 1, 10.0, 20.0, hours=1.0),
        scores("base", 2, 12.0, 23.0, hours=2.0),
        scores("one-head", 1, 14.5, 18.0),
        scores("one-head", 2, 15.5, 18.5),
        scores("half", 1, 11.25, 21.5, parameters=7654321, updates=9),
        scores("own", 2, 9.0, 25.0),
    )
    folder.build()
    return folder


@pytest.fixture
def unplotted(monkeypatch) -> None:
    """For many small tables: a plot takes longer than all the rest."""
    monkeypatch.setattr(results, "plot", lambda study, table: b"")


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
        "perplexity_difference": None if perplexity is None else perplexity - 11,
        "bleu_difference": None if bleu is None else bleu - 21.5,
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
        "parameters": "1,234,567",
        "paper's row": "base",
        "paper PPL": "4.92",
        "paper BLEU": "25.8",
        "paper dPPL": "+0.00",
        "paper dBLEU": "+0.0",
    }
    assert list(table["one-head"].values()) == [
        "one-head", "num\\_heads=1", "15.00 ± 0.71", "18.25 ± 0.35", "+4.00", "-3.25", "1,234,567", "A-h1", "5.29",
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


@pytest.mark.usefixtures("unplotted")
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
def test_a_run_that_diverged_still_gives_all_three_files(folder, value, seeds):
    folder.study(variant("base"), variant("hot"), seeds=seeds)
    folder.add(*(scores("base", seed, 10.0, 20.0) for seed in seeds))
    folder.add(*(scores("hot", seed, value if seed == 1 else 10.0, 0.0) for seed in seeds))
    folder.build()
    assert set(folder.files()) == {"s.csv", "s.md", "s.png"}
    assert folder.csv()["hot"]["perplexity"] == str(value)


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


# What may be compared


@pytest.mark.usefixtures("unplotted")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data", "other0data"),
        ("tokenizer", "other0tokenizer"),
        ("split", "test"),
        ("bleu.signature", SACRE.replace("13a", "intl")),
        ("bleu.sentences", 699),
        ("compound_split_bleu.signature", SPLIT.replace("0.1.1", "0.2.0")),
        ("beam_size", 1),
        ("length_penalty", 1.0),
    ],
)
@pytest.mark.parametrize(("name", "seed"), [("other", 1), ("base", 2)])
def test_runs_that_differ_in_what_must_agree_are_refused_by_field_and_names(folder, capsys, field, value, name, seed):
    """C61: between variants, and between seeds of one."""
    folder.study(variant("base"), variant("other"), seeds=(1, 2))
    folder.add(result("base", 1), result("base", 2), result("other", 1))
    folder.build()
    before = folder.files()
    odd = result(name, seed, **{field: value})
    folder.add(odd)
    assert main(["results", "s", "--runs", str(folder.runs), "--out", str(folder.out)]) == 1
    message = capsys.readouterr().err
    usual = str(results.get(result("base"), field))
    for word in (field, str(value), usual, f"{name}/seed{seed}", "base/seed1"):
        assert word in message
    assert len(message.splitlines()) == 1
    assert folder.files() == before


@pytest.mark.usefixtures("unplotted")
@pytest.mark.parametrize(
    ("field", "value"),
    [("updates", 3000), ("vocab_size", 2000), ("parameters", 5), ("device", "H200"), ("hours", 9.0), ("processes", 8)],
)
def test_runs_may_differ_in_what_a_study_is_about(folder, field, value):
    folder.study(variant("base"), variant("other"))
    folder.add(result("base"), result("other", **{field: value}))
    folder.build()
    assert folder.csv()["other"]["bleu"] == "10.0"


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_result_that_cannot_be_read_is_named(folder, capsys, content):
    folder.study(variant("base"))
    folder.add(result("base"))
    file = folder.runs / "s" / "base" / "seed1" / "result.json"
    file.write_text(content)
    assert main(["results", "s", "--runs", str(folder.runs), "--out", str(folder.out)]) == 1
    assert str(file) in capsys.readouterr().err
    assert not folder.files()


def test_a_study_that_has_not_begun_is_said_to_be_so(folder, capsys):
    assert main(["results", "s", "--runs", str(folder.runs), "--out", str(folder.out)]) == 1
    message = capsys.readouterr().err
    assert str(folder.runs / "s") in message and "sweep run" in message
    assert not folder.files()


# The table for people


@pytest.mark.usefixtures("unplotted")
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


def test_the_command_prints_the_table_and_where_it_is(whole, capsys):
    assert main(["results", "s", "--runs", str(whole.runs), "--out", str(whole.out)]) == 0
    printed = capsys.readouterr().out
    assert whole.markdown in printed
    assert (whole.out / "s.md").read_text(encoding="utf-8") == whole.markdown
    assert str(whole.out / "s.csv") in printed


def test_the_papers_figures_beside_the_results_come_before_the_projects_own(folder):
    folder.study(variant("base"), variant("A-h1"))
    folder.out.mkdir()
    (folder.out / "paper_table3.csv").write_text("row,PPL,BLEU\nbase,2.00,50.0\nA-h1,3.00,\n")
    folder.build()
    row = folder.csv()["A-h1"]
    assert (row["paper_perplexity"], row["paper_perplexity_difference"]) == ("3.0", "1.0")
    assert (row["paper_bleu"], row["paper_bleu_difference"]) == ("", "")


def test_tables_need_none_of_the_libraries_that_train():
    check = (
        "import sys, lit_transformer.results as r; sys.exit(bool({'torch', 'lightning', 'optuna'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


# The plot


@pytest.mark.parametrize("finished", [0, 1, 2, 5])
def test_the_plot_is_an_image_that_grows_with_its_rows(folder, finished):
    from matplotlib import image

    names = ["base", "A-h1", "own", "C-N2", "C-N4"]
    folder.study(*map(variant, names))
    folder.add(*(scores(name, 1, 10.0 + i, 20.0 - i) for i, name in enumerate(names[:finished])))
    folder.build()
    file = folder.out / "s.png"
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    height, width, _ = image.imread(file).shape
    assert width == 1200
    assert height == pytest.approx(120 * (1.6 + 0.45 * max(finished - 1, 0)), abs=1)


def test_the_plots_bars_are_the_differences_of_the_table(whole, monkeypatch):
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    whole.build()
    rows = [row for name, row in whole.csv().items() if name in ("one-head", "half", "own")]
    try:
        for axis, measure in zip(pyplot.gcf().axes, ("bleu", "perplexity"), strict=True):
            for bars, source in zip(axis.containers, ("", "paper_"), strict=True):
                texts = [row[f"{source}{measure}_difference"] for row in rows]
                expected = {i: float(text) for i, text in enumerate(texts) if text}
                found = {round(bar.get_y() + bar.get_height() / 2): bar.get_width() for bar in bars}
                assert found == pytest.approx(expected)
        labels = [text.get_text() for text in pyplot.gcf().axes[0].get_yticklabels()]
        assert labels == [row["variant"] for row in rows]
    finally:
        monkeypatch.undo()
        pyplot.close("all")


# Writing


def test_the_same_results_give_the_same_bytes(whole):
    before = whole.files()
    whole.build()
    assert whole.files() == before
    assert set(before) == {f"s.{ending}" for ending in ENDINGS}


def test_a_file_in_place_of_the_results_folder_is_a_plain_error(folder, capsys):
    folder.study(variant("base"))
    folder.add(result("base"))
    folder.out.write_text("mine")
    assert main(["results", "s", "--runs", str(folder.runs), "--out", str(folder.out)]) == 1
    message = capsys.readouterr().err
    assert str(folder.out) in message
    assert len(message.splitlines()) == 1
    assert folder.out.read_text() == "mine"


def test_a_folder_that_cannot_be_written_keeps_its_files(whole, monkeypatch, capsys):
    """As a read-only folder does; permissions do not bind root, so the refusal is staged."""
    before = whole.files()
    whole.add(scores("late", 1, 1.0, 99.0))

    def refused(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(whole.out))

    monkeypatch.setattr("tempfile.mkstemp", refused)
    assert main(["results", "s", "--runs", str(whole.runs), "--out", str(whole.out)]) == 1
    message = capsys.readouterr().err
    assert "Permission denied" in message and len(message.splitlines()) == 1
    assert whole.files() == before


def test_a_plot_that_cannot_be_drawn_leaves_no_new_tables_beside_the_old_plot(whole, monkeypatch):
    before = whole.files()
    whole.add(scores("late", 1, 1.0, 99.0))

    def broken(*args):
        raise ValueError("no fonts")

    monkeypatch.setattr(results, "plot", broken)
    with pytest.raises(ValueError, match="no fonts"):
        whole.build()
    assert whole.files() == before


@pytest.mark.parametrize("which", ENDINGS)
def test_a_write_that_breaks_off_leaves_that_file_as_it_was(whole, monkeypatch, which):
    before = whole.files()
    whole.add(scores("late", 1, 1.0, 99.0))
    replace = results.write_atomic.__globals__["os"].replace

    def breaks(source, target):
        if str(target).endswith(which):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr("os.replace", breaks)
    with pytest.raises(OSError, match="No space"):
        whole.build()
    monkeypatch.undo()
    assert whole.files()[f"s.{which}"] == before[f"s.{which}"]
    assert set(whole.files()) == set(before)


def _build(runs: Path, out: Path, times: int) -> None:
    for _ in range(times):
        build(runs, "s", out)


def test_builds_at_the_same_time_leave_the_files_of_one(whole):
    expected = whole.files()
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_build, args=(whole.runs, whole.out, 3)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert whole.files() == expected


def test_a_build_that_began_with_fewer_results_does_not_end_on_top_of_a_newer_one(whole, monkeypatch, tmp_path):
    """The second begins while the first draws: it has to wait, or the first has to notice."""
    plot, second = results.plot, []

    def slow(*args):
        if not second:
            whole.add(scores("late", 1, 1.0, 99.0))
            second.append(multiprocessing.get_context("fork").Process(target=_build, args=(whole.runs, whole.out, 1)))
            second[0].start()
            second[0].join(3)
        return plot(*args)

    monkeypatch.setattr(results, "plot", slow)
    whole.build()
    second[0].join(30)
    assert second[0].exitcode == 0
    found = whole.files()
    build(whole.runs, "s", tmp_path / "fresh")
    for ending in ENDINGS:
        assert found[f"s.{ending}"] == (tmp_path / "fresh" / f"s.{ending}").read_bytes(), ending
