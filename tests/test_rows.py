"""Which runs make up a table, and which are never put into one."""

import pytest
from results_folder import SACRE, SPLIT, result, variant

from lit_transformer.__main__ import main
from lit_transformer.rows import get

pytestmark = pytest.mark.usefixtures("unplotted")


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
    usual = str(get(result("base"), field))
    for word in (field, str(value), usual, f"{name}/seed{seed}", "base/seed1"):
        assert word in message
    assert len(message.splitlines()) == 1
    assert folder.files() == before


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
