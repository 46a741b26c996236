"""results compare: two runs or two rows, their scores, whether they differ, and where."""

import csv
import json
import math
import re

import pytest
from results_folder import SACRE, SPLIT, result
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from lit_transformer.__main__ import main

REFERENCES = [f"and god made thing number {i} and it was good" for i in range(40)]
BASE = [line.replace("made", "took") if i % 4 == 0 else line for i, line in enumerate(REFERENCES)]
OTHER = [f"bad {i}" if i % 2 else line for i, line in enumerate(REFERENCES)]


@pytest.fixture
def rows(folder):
    """base with seeds 1 and 2, other with seeds 2 and 10."""
    folder.sentences(result("base", 1), REFERENCES, REFERENCES)
    folder.sentences(result("base", 2), BASE, REFERENCES, nll=2.0)
    folder.sentences(result("other", 2), OTHER, REFERENCES, nll=4.0)
    folder.sentences(result("other", 10), OTHER[::-1], REFERENCES)
    return folder


def run(folder, *args):
    return main(["results", "compare", *map(str, args), "--runs", str(folder.runs)])


def table(printed: str) -> dict[str, list[float]]:
    """{measure: [A, B, B - A, low, high]}"""
    lines = [line for line in printed.split("\n") if re.match(r"(BLEU|perplexity) +\d", line)]
    return {line.split()[0]: [float(x) for x in re.findall(r"[-+]?\d+\.\d\d\b(?!\d)", line)[:5]] for line in lines}


def refused(folder, capsys, *args) -> str:
    assert run(folder, *args) == 1
    message = capsys.readouterr().err
    assert len(message.splitlines()) == 1
    return message


def test_two_rows_over_the_seeds_that_both_have(rows, capsys):
    assert run(rows, "s/base", "s/other") == 0
    printed = capsys.readouterr().out
    found = table(printed)
    bleus = [BLEU().corpus_score(outputs, [REFERENCES]).score for outputs in (BASE, OTHER)]
    assert found["BLEU"][:3] == pytest.approx([*bleus, bleus[1] - bleus[0]], abs=0.006)
    assert found["BLEU"][3] < found["BLEU"][2] < found["BLEU"][4] < 0
    perplexities = [math.exp(0.5), math.e]
    expected = [*perplexities, *[perplexities[1] - perplexities[0]] * 3]
    assert found["perplexity"] == pytest.approx(expected, abs=0.006)
    assert "40 sentences, seed 2\n" in printed and SACRE in printed
    systems = [("a", BASE), ("b", OTHER)]
    _, tested = PairedTest(systems, {"BLEU": BLEU()}, [REFERENCES], test_type="bs")()
    p = tested["BLEU"][1].p_value
    assert ("p < 0.001" if p < 0.001 else f"p = {p:.3f}") in printed


def test_two_runs_may_have_different_seeds(rows, capsys):
    assert run(rows, rows.runs / "s" / "base" / "seed1", rows.runs / "s" / "other" / "seed2") == 0
    printed = capsys.readouterr().out
    assert table(printed)["BLEU"][0] == 100
    assert "seeds" not in printed


def test_a_run_and_a_row_of_one_seed(rows, capsys):
    rows.sentences(result("single", 5), BASE, REFERENCES)
    assert run(rows, rows.runs / "s" / "base" / "seed2", "s/single") == 0
    assert table(capsys.readouterr().out)["BLEU"][2:] == [0, 0, 0]


def test_a_run_beside_a_row_of_several_seeds_is_refused(rows, capsys):
    message = refused(rows, capsys, rows.runs / "s" / "base" / "seed1", "s/other")
    assert "one is a run, the other a row" in message


def test_a_run_with_itself_is_no_difference(rows, capsys):
    assert run(rows, "s/base", "s/base") == 0
    printed = capsys.readouterr().out
    assert "p = 1.000" in printed and "better in 0, worse in 0, the same in 80" in printed
    assert "loses" not in printed and "gains" not in printed


def test_rows_without_a_common_seed_are_refused(rows, capsys):
    rows.sentences(result("third", 3), BASE, REFERENCES)
    message = refused(rows, capsys, "s/base", "s/third")
    assert "s/base has seeds 1, 2, s/third has 3: none is common" in message


# Sentences


def test_the_sentences_that_differ_most(rows, capsys):
    assert run(rows, "s/base", "s/other", "--sentences", "2") == 0
    printed = capsys.readouterr().out
    loses, gains = printed.partition("B loses most:")[2].split("B gains most:")
    assert "better in 10, worse in 20, the same in 10" in printed
    assert loses.count("source") == gains.count("source") == 2
    n = int(re.search(r"sentence (\d+), seed 2", loses)[1]) - 1
    assert f"    A         {BASE[n]}\n    B         {OTHER[n]}" in loses
    assert f"    reference {REFERENCES[n]}\n" in loses


def test_no_sentences_where_none_are_asked_for(rows, capsys):
    assert run(rows, "s/base", "s/other", "--sentences", "0") == 0
    assert "source" not in capsys.readouterr().out
    assert "must be at least 0" in refused(rows, capsys, "s/base", "s/other", "--sentences", "-1")


@pytest.mark.parametrize(("ending", "separator"), [("tsv", "\t"), ("csv", ",")])
def test_all_sentences_into_a_file(rows, tmp_path, ending, separator):
    text = 'tab\tcomma, "quote"\nline'
    rows.sentences(result("odd", 2), [text, *BASE[1:]], REFERENCES, nll=[None, *[1.0] * 39])
    file = tmp_path / "new" / f"all.{ending}"
    assert run(rows, "s/base", "s/odd", "--output", file) == 0
    with open(file, newline="", encoding="utf-8") as opened:
        found = list(csv.DictReader(opened, delimiter=separator))
    assert [(int(row["seed"]), int(row["sentence"])) for row in found] == [(2, i + 1) for i in range(40)]
    assert [row["output_a"] for row in found] == BASE
    assert (found[0]["output_b"], found[0]["nll_a"], found[0]["nll_b"]) == (text, "2.0", "")
    assert [row["reference"] for row in found] == REFERENCES
    score = CHRF().sentence_score(text, [REFERENCES[0]]).score
    assert float(found[0]["chrf_b"]) == score
    assert float(found[0]["chrf_difference"]) == score - float(found[0]["chrf_a"])


def test_a_file_that_cannot_be_written_stays_as_it_was(rows, tmp_path, monkeypatch, capsys):
    file = tmp_path / "all.tsv"
    file.write_text("mine")

    def breaks(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", breaks)
    assert "No space" in refused(rows, capsys, "s/base", "s/other", "--output", file)
    assert file.read_text() == "mine" and [path.name for path in tmp_path.iterdir() if path.is_file()] == ["all.tsv"]


def test_only_these_endings(rows, tmp_path, capsys):
    assert "must end in .tsv or .csv" in refused(rows, capsys, "s/base", "s/other", "--output", tmp_path / "all.txt")


# The test split


def test_the_test_split_is_read_from_its_own_files(rows, capsys):
    assert "test.json is there: run `lit-transformer test`" in refused(
        rows, capsys, "s/base", "s/other", "--split", "test"
    )
    for name, outputs in (("base", REFERENCES), ("other", OTHER)):
        folder = rows.runs / "s" / name / "seed2"
        kept = (folder / "result.json").read_bytes()
        rows.sentences(result(name, 2, split="test"), outputs, REFERENCES)
        tested = json.loads((folder / "result.json").read_text())
        for key in ("hours", "flops", "device"):  # `test` does not train
            del tested[key]
        (folder / "test.json").write_text(json.dumps(tested))
        (folder / "result.json").write_bytes(kept)
    assert run(rows, "s/base", "s/other", "--split", "test") == 0
    printed = capsys.readouterr().out
    assert table(printed)["BLEU"][0] == 100 and "test: 40 sentences" in printed


# What is refused


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data", "other0data"),
        ("tokenizer", "other0tokenizer"),
        ("beam_size", 1),
        ("length_penalty", 1.0),
        ("bleu.signature", SACRE.replace("13a", "intl")),
        ("compound_split_bleu.signature", SPLIT.replace("0.1.1", "0.2.0")),
    ],
)
def test_the_differing_field_is_named(rows, capsys, field, value):
    rows.sentences(result("odd", 2, **{field: value}), BASE, REFERENCES)
    message = refused(rows, capsys, "s/base", "s/odd")
    for word in (field, str(value), "s/base (seed 1)", "s/odd (seed 2)"):
        assert word in message


def test_other_references_are_named_by_line(rows, capsys):
    rows.sentences(result("odd", 2), BASE, [*REFERENCES[:3], "else", *REFERENCES[4:]])
    assert "references differ from line 4 on" in refused(rows, capsys, "s/base", "s/odd")


def test_what_is_not_there_is_named(rows, capsys):
    message = refused(rows, capsys, "s/base", "s/nothing")
    assert "s/nothing" in message and "STUDY/VARIANT" in message


def test_a_run_of_an_older_version_is_named(rows, capsys):
    rows.add(result("old", 2))
    message = refused(rows, capsys, "s/base", "s/old")
    assert "old/seed2 has no sentences.valid.jsonl" in message and "result.json" in message


def test_a_result_that_cannot_be_read_is_named(rows, capsys):
    file = rows.runs / "s" / "base" / "seed2" / "result.json"
    file.write_text("{")
    assert f"{file} is no result" in refused(rows, capsys, "s/base", "s/other")


def test_a_perplexity_without_end_is_shown_as_such(rows, capsys):
    rows.sentences(result("hot", 2), OTHER, REFERENCES, nll=1e6)
    assert run(rows, "s/base", "s/hot") == 0
    assert re.search(r"perplexity +1\.65 +inf$", capsys.readouterr().out, re.M)


def test_both_have_to_be_named(rows):
    with pytest.raises(SystemExit):
        run(rows, "s/base")
