"""Studies: read strictly, checked whole before anything trains, and never changed under results that exist."""

import csv
import json
import os
import re
from pathlib import Path

import pytest

from lit_transformer.__main__ import main
from lit_transformer.preflight import check, describe, note_failures
from lit_transformer.study import Cell, Study, Variant, fit_arguments, read_study_file
from lit_transformer.transformer import TransformerConfig

REPOSITORY = Path(__file__).parents[1]
SWEEPS = sorted((REPOSITORY / "sweeps").glob("*.yaml"))
PAPER = Path(__file__).parents[2] / "shared" / "paper.md"
# Columns of paper_table3.csv and the fields that they are; steps are the trainer's.
FIELDS = {
    "N": "num_layers",
    "d_model": "d_model",
    "d_ff": "d_ff",
    "h": "num_heads",
    "d_k": "d_k",
    "d_v": "d_v",
    "P_drop": "dropout",
    "eps_ls": "label_smoothing",
    "position": "position",
}
BASE = """
model: {num_layers: 1, d_model: 16, d_ff: 32, num_heads: 2}
data: {source: files, src_lang: de, tgt_lang: en, train: [no.de, no.en], valid: [no.de, no.en], vocab_size: 300}
trainer: {accelerator: cpu, devices: 1, max_steps: 4}
"""
GOOD = """
name: small
config: [base.yaml]
variants: [{name: base}, {name: narrow, set: {d_ff: 8}}]
"""


def write(folder: Path, study: str = GOOD, base: str = BASE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "base.yaml").write_text(base)
    (folder / "study.yaml").write_text(study)
    return folder / "study.yaml"


def with_variants(variants: str, **more: str) -> str:
    fields = {"name": "small", "config": "[base.yaml]", "variants": variants, **more}
    return "".join(f"{key}: {value}\n" for key, value in fields.items())


def checked(file: Path, runs: Path) -> dict:
    study = read_study_file(file)
    return check(study, file, runs / study.name)


def run(file: Path, runs: Path, *cells: str) -> None:
    """What is left behind where these cells have finished."""
    resolved = checked(file, runs)
    study = read_study_file(file)
    describe(study, runs / study.name, resolved)
    for cell in cells:
        folder = runs / study.name / cell
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_text("{}")


def table3() -> list[dict[str, str]]:
    with open(REPOSITORY / "results" / "paper_table3.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# Reading


def test_a_study_is_read_with_its_defaults(tmp_path):
    assert read_study_file(write(tmp_path)) == Study(
        name="small",
        config=["base.yaml"],
        variants=[Variant("base", {}, ""), Variant("narrow", {"d_ff": 8}, "")],
        seeds=[1],
        metric="bleu",
        set={},
        launcher=[],
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.5e3", 1500.0),
        (".5", 0.5),
        ("8", 8),
        ("true", True),
        ("null", None),
        ("learned", "learned"),
        ("[1, 2]", [1, 2]),
    ],
)
def test_values_are_read_by_the_rules_of_configuration_files(tmp_path, text, value):
    file = write(tmp_path, with_variants("[{name: a, set: {x: %s}}]" % text, set="{y: %s}" % text))  # noqa: UP031
    study = read_study_file(file)
    for read in (study.variants[0].set["x"], study.set["y"]):
        assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("study", "words"),
    [
        pytest.param(GOOD.replace("variants", "varients"), ["varients"], id="misspelt key"),
        pytest.param(GOOD + "workers: 3\n", ["workers"], id="unknown key"),
        pytest.param(with_variants("[{name: a, sets: {d_ff: 8}}]"), ["sets"], id="misspelt key of a variant"),
        pytest.param(with_variants("[{set: {d_ff: 8}}]"), ["name"], id="variant without a name"),
        pytest.param("name: a\nvariants: [{name: a}]\n", ["config"], id="no configuration"),
        pytest.param(GOOD + "metric: chrf\n", ["metric", "chrf"], id="unknown metric"),
        pytest.param(with_variants("[]"), ["variant"], id="no variants"),
        pytest.param(with_variants("[{name: a}, {name: b}, {name: a}]"), ["variant", "'a'"], id="a name twice"),
        pytest.param(GOOD + "seeds: []\n", ["seed"], id="no seeds"),
        pytest.param(GOOD + "seeds: [1, 2, 1]\n", ["seed", "[1, 2, 1]"], id="a seed twice"),
        pytest.param(GOOD + "seeds: [one]\n", ["seeds", "one"], id="a word as a seed"),
        pytest.param(GOOD + "seeds: [1.5]\n", ["seeds", "1.5"], id="half a seed"),
        pytest.param(GOOD + "seeds: [true]\n", ["seeds"], id="a yes as a seed"),
        pytest.param(GOOD + "seeds: 3\n", ["seeds", "3"], id="a number of seeds"),
        pytest.param(with_variants("[{name: a, set: [d_ff]}]"), ["set"], id="a list for set"),
        pytest.param(with_variants("[{name: 12}]"), ["name", "12"], id="a number for a name"),
        pytest.param(GOOD + "launcher: torchrun\n", ["launcher", "torchrun"], id="a word as launcher"),
        pytest.param("", [], id="empty file"),
        pytest.param("- name: a\n", [], id="a list"),
        pytest.param("name: [\n", [], id="no YAML"),
        pytest.param("name: a\n\tconfig: b\n", [], id="tabs"),
        pytest.param("\x00", [], id="a NUL byte"),
    ],
)
def test_a_study_that_says_something_wrong_is_refused_by_name(tmp_path, study, words):
    file = write(tmp_path, study)
    with pytest.raises(ValueError, match=r"study\.yaml") as error:
        read_study_file(file)
    for word in words:
        assert word in str(error.value).replace(str(tmp_path), "")


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "/x", "..", ".", ".hidden", "", "a b", "-x", "a\\b", "ä", "a\n", "a:b"]
)
@pytest.mark.parametrize("whose", ["study", "variant"])
def test_names_that_are_no_plain_folder_are_refused(tmp_path, name, whose):
    quoted = json.dumps(name, ensure_ascii=False)
    study = with_variants(f"[{{name: {quoted}}}]") if whose == "variant" else with_variants("[{name: a}]", name=quoted)
    with pytest.raises(ValueError, match=r"study\.yaml.*name"):
        read_study_file(write(tmp_path, study))


def test_a_study_cannot_take_the_name_of_the_papers_table(tmp_path):
    """Its csv would replace the paper's figures."""
    with pytest.raises(ValueError, match="paper_table3"):
        read_study_file(write(tmp_path, GOOD.replace("small", "paper_table3")))


@pytest.mark.parametrize("name", ["study.json", "optuna.db"])
def test_a_variant_cannot_take_the_name_of_a_file_of_the_study(tmp_path, name):
    with pytest.raises(ValueError, match=name):
        read_study_file(write(tmp_path, with_variants(f"[{{name: base}}, {{name: {name}}}]")))


def test_a_missing_study_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.yaml"):
        read_study_file(tmp_path / "nowhere.yaml")


def test_a_folder_for_a_study_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        read_study_file(tmp_path)


def test_all_variants_have_their_first_seed_before_any_has_its_second():
    study = Study("s", [], [Variant("a"), Variant("b")], seeds=[3, 1])
    assert [str(cell) for cell in study.cells()] == ["a/seed3", "b/seed3", "a/seed1", "b/seed1"]


# Resolving: every variant, by the parser of `fit`


def test_each_cell_resolves_to_base_with_its_changes(tmp_path):
    resolved = checked(write(tmp_path, GOOD + "seeds: [1, 7]\nset: {dropout: 1e-2}\n"), tmp_path / "runs")
    assert list(resolved) == ["base/seed1", "narrow/seed1", "base/seed7", "narrow/seed7"]
    for name, config in resolved.items():
        variant, _, seed = name.partition("/seed")
        assert config["seed_everything"] == int(seed)
        assert config["model"]["d_ff"] == (8 if variant == "narrow" else 32)
        assert config["model"]["dropout"] == 0.01
        assert config["trainer"]["max_steps"] == 4
        assert config["run"]["dir"] == str(tmp_path / "runs" / "small" / name)
        assert (config["run"]["study"], config["run"]["variant"]) == ("small", variant)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr_factor", 1e-5),
        ("lr_factor", 3.0e20),
        ("dropout", 0.0),
        ("d_k", None),
        ("position", "learned"),
        ("model.d_ff", 8),
        ("trainer.deterministic", True),
        ("trainer.devices", [0]),
        ("trainer.gradient_clip_val", None),
        ("run.wandb", "none"),
        ("data.train", ["a b.de", "c,d.en"]),
    ],
)
def test_a_value_reaches_the_run_as_it_stands_in_the_study(tmp_path, key, value):
    for where in ("variant", "study"):
        changes = json.dumps({key: value})
        variants = f"[{{name: a, set: {changes if where == 'variant' else {}}}}]"
        study = with_variants(variants, set=changes if where == "study" else "{}")
        found = checked(write(tmp_path, study), tmp_path / "runs")["a/seed1"]
        for part in (key if "." in key else f"model.{key}").split("."):
            found = found[part]
        assert (found, type(found)) == (value, type(value))


def test_a_variant_overrides_its_study_which_overrides_its_files(tmp_path):
    (tmp_path / "more.yaml").write_text("model: {d_ff: 40, num_heads: 4}\n")
    study = with_variants(
        "[{name: a}, {name: b, set: {d_ff: 60}}, {name: c, set: {model.d_ff: 70}}]",
        config="[base.yaml, more.yaml]",
        set="{d_ff: 50}",
    )
    resolved = checked(write(tmp_path, study), tmp_path / "runs")
    assert [resolved[f"{name}/seed1"]["model"]["d_ff"] for name in "abc"] == [50, 60, 70]
    assert all(config["model"]["num_heads"] == 4 for config in resolved.values())


def test_a_full_key_in_the_study_yields_to_a_short_one_in_the_variant(tmp_path):
    study = with_variants("[{name: a, set: {d_ff: 60}}]", set="{model.d_ff: 50}")
    assert checked(write(tmp_path, study), tmp_path / "runs")["a/seed1"]["model"]["d_ff"] == 60


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("{num_head: 2}", ["num_head"]),
        ("{d_modell: 32}", ["d_modell"]),
        ("{trainer.max_step: 3}", ["max_step"]),
        ("{trainer.max_epochs: 3}", ["max_epochs"]),
        ("{optimizer.lr: 1e-3}", ["optimizer"]),
        ("{d_ff: many}", ["d_ff", "many"]),
        ("{d_ff: 1.5}", ["d_ff", "1.5"]),
        ("{dropout: 1.5}", ["dropout", "1.5"]),
        ("{position: rotary}", ["position", "rotary"]),
        ("{num_heads: 3}", ["num_heads", "3"]),
        ("{warmup: 0}", ["warmup"]),
        ("{trainer.max_steps: 0}", ["max_steps"]),
        ("{trainer.precision: fp8}", ["precision", "fp8"]),
        ("{data.source: web}", ["source", "web"]),
        ("{vocab_size: 400}", ["vocab_size"]),
        ("{seed_everything: 3}", ["seed_everything"]),
        ("{run.keep_checkpoints: 0}", ["keep_checkpoints"]),
    ],
)
def test_a_variant_that_cannot_run_is_refused_by_its_name_and_key(tmp_path, changes, words):
    file = write(tmp_path, with_variants(f"[{{name: base}}, {{name: odd-one, set: {changes}}}]"))
    with pytest.raises(ValueError, match="odd-one") as error:
        checked(file, tmp_path / "runs")
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("key", ["run.dir", "run.variant", "run.study"])
def test_a_variant_cannot_set_what_the_study_sets_itself(tmp_path, key):
    """Or it would be ignored in silence."""
    file = write(tmp_path, with_variants(f"[{{name: odd-one, set: {{{key}: elsewhere}}}}]"))
    with pytest.raises(ValueError, match="odd-one"):
        checked(file, tmp_path / "runs")


def test_a_seed_that_no_run_can_have_is_refused_before_anything_trains(tmp_path):
    with pytest.raises(ValueError, match="-1"):
        checked(write(tmp_path, GOOD + "seeds: [-1]\n"), tmp_path / "runs")


@pytest.mark.parametrize("content", [None, "model: [\n", "modell: {d_ff: 8}\n"])
def test_a_base_configuration_that_cannot_be_read_is_refused(tmp_path, content):
    file = write(tmp_path, GOOD.replace("[base.yaml]", "[base.yaml, other.yaml]"))
    if content:
        (tmp_path / "other.yaml").write_text(content)
    with pytest.raises(ValueError, match=r"study\.yaml") as error:
        checked(file, tmp_path / "runs")
    assert ("modell" if content and "modell" in content else "other.yaml") in str(error.value)


def test_configuration_files_are_relative_to_the_study_wherever_one_stands(tmp_path, monkeypatch):
    file = write(tmp_path / "deep" / "er")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for path in (file, Path(os.path.relpath(file))):
        arguments = fit_arguments(read_study_file(path), path, Cell(Variant("base"), 1), Path("runs"))
        assert arguments[:2] == ["--config", os.path.join("..", "deep", "er", "base.yaml")]
        assert checked(path, Path("runs"))["base/seed1"]["model"]["d_ff"] == 32


def test_checking_writes_nothing(tmp_path):
    file = write(tmp_path / "study")
    before = sorted(tmp_path.rglob("*"))
    checked(file, tmp_path / "runs")
    assert sorted(tmp_path.rglob("*")) == before


def test_heads_that_do_not_divide_d_model_stop_a_sweep_before_it_leaves_anything(tmp_path, capsys):
    """C60, with other variants before it that could run."""
    base = BASE.replace("{source", f"{{root: {tmp_path}/data, source")
    study = with_variants("[{name: base}, {name: six-heads, set: {d_model: 512, num_heads: 6}}]")
    file = write(tmp_path, study, base)
    before = sorted(tmp_path.rglob("*"))
    status = main(["sweep", "run", str(file), "--runs", f"{tmp_path}/runs", "--out", f"{tmp_path}/results"])
    message = capsys.readouterr().err
    assert status == 1
    for word in ("six-heads", "512", "6", "d_k"):
        assert word in message
    assert len(message.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_heads_that_do_not_divide_d_model_are_fine_with_their_own_width(tmp_path):
    study = with_variants("[{name: six-heads, set: {d_model: 512, num_heads: 6, d_k: 64, d_v: 64}}]")
    assert checked(write(tmp_path, study), tmp_path / "runs")["six-heads/seed1"]["model"]["num_heads"] == 6


# Results that exist


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("d_model: 16", "d_model: 32", "model.d_model"),
        ("max_steps: 4", "max_steps: 8", "trainer.max_steps"),
        ("vocab_size: 300", "vocab_size: 301", "data.vocab_size"),
        ("train: [no.de, no.en]", "train: [yes.de, yes.en]", "data.train"),
    ],
)
def test_another_base_configuration_under_results_is_refused_by_its_field(tmp_path, old, new, field):
    file = write(tmp_path)
    run(file, tmp_path / "runs", "narrow/seed1")
    (tmp_path / "base.yaml").write_text(BASE.replace(old, new))
    with pytest.raises(ValueError, match=f"narrow/seed1 .*{field} was .* is .* now"):
        checked(file, tmp_path / "runs")
    (tmp_path / "base.yaml").write_text(BASE)
    checked(file, tmp_path / "runs")


def test_another_value_for_a_variant_with_a_result_is_refused(tmp_path):
    run(write(tmp_path), tmp_path / "runs", "narrow/seed1")
    with pytest.raises(ValueError, match=r"narrow/seed1 .*model.d_ff was 8 and is 9 now"):
        checked(write(tmp_path, GOOD.replace("d_ff: 8", "d_ff: 9")), tmp_path / "runs")


def test_a_variant_without_a_result_can_still_be_changed(tmp_path):
    run(write(tmp_path), tmp_path / "runs", "base/seed1")
    resolved = checked(write(tmp_path, GOOD.replace("d_ff: 8", "d_ff: 9")), tmp_path / "runs")
    assert resolved["narrow/seed1"]["model"]["d_ff"] == 9


@pytest.mark.parametrize(
    "study",
    [
        pytest.param(GOOD.replace("}}]", "}}, {name: wide, set: {d_ff: 64}}]"), id="variant added"),
        pytest.param(GOOD.replace("[{name: base}", "[{name: first, set: {d_ff: 64}}, {name: base}"), id="at the top"),
        pytest.param(GOOD + "seeds: [1, 2]\n", id="seed added"),
        pytest.param(with_variants("[{name: base}]"), id="variant removed"),
        pytest.param(GOOD + "launcher: [torchrun]\n", id="another launcher"),
    ],
)
def test_a_study_may_grow_and_shrink_over_its_results(tmp_path, study):
    run(write(tmp_path), tmp_path / "runs", "base/seed1", "narrow/seed1")
    checked(write(tmp_path, study), tmp_path / "runs")


def test_a_variant_that_comes_back_changed_is_refused_where_its_result_still_stands(tmp_path):
    """Or the old result would be shown as that of the new values."""
    runs = tmp_path / "runs"
    run(write(tmp_path), runs, "base/seed1", "narrow/seed1")
    run(write(tmp_path, with_variants("[{name: base}]")), runs)
    with pytest.raises(ValueError, match=r"narrow.*d_ff"):
        checked(write(tmp_path, GOOD.replace("d_ff: 8", "d_ff: 9")), runs)


def test_the_same_folder_spelt_in_another_way_is_no_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path)
    run(file, Path("runs"), "base/seed1")
    checked(file, tmp_path / "runs")


def test_failures_stand_in_the_studys_description(tmp_path):
    file = write(tmp_path)
    describe(read_study_file(file), tmp_path / "runs", checked(file, tmp_path))
    note_failures(tmp_path / "runs", {"narrow": "killed by signal 9"})
    described = json.loads((tmp_path / "runs" / "study.json").read_text())
    assert [v["failed"] for v in described["variants"]] == ["", "killed by signal 9"]
    assert [v["paper"] for v in described["variants"]] == ["base", "narrow"]


# The studies that come with the project


@pytest.fixture(scope="module")
def shipped(tmp_path_factory) -> dict[str, tuple[Study, dict]]:
    """Each study with its cells' configurations, from a folder that has neither configurations nor data."""
    found, elsewhere = {}, tmp_path_factory.mktemp("elsewhere")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(elsewhere)
        for file in SWEEPS:
            study = read_study_file(file)
            found[file.stem] = study, check(study, file, elsewhere / "runs")
    assert not list(elsewhere.iterdir())
    return found


@pytest.mark.parametrize("name", [file.stem for file in SWEEPS])
def test_every_study_resolves_from_anywhere_without_its_data(shipped, name):
    study, resolved = shipped[name]
    assert study.name == name
    assert list(resolved) == ([str(cell) for cell in study.cells()] or ["base/seed1"])


def test_table3_has_the_papers_rows_in_its_order_field_by_field(shipped):
    (study, resolved), rows = shipped["table3"], table3()
    assert len(rows) == 20
    assert [variant.name for variant in study.variants] == [row["row"] for row in rows]
    for row in rows:
        config = resolved[f"{row['row']}/seed{study.seeds[0]}"]
        assert config["trainer"]["max_steps"] == int(row["steps"]), row["row"]
        for column, name in FIELDS.items():
            value = config["model"][name]
            assert value == type(value)(row[column]), (row["row"], name)
        assert config["model"]["lr_factor"] == 1 and config["model"]["warmup"] == 4000


def test_the_papers_csv_is_the_papers_table():
    if not PAPER.is_file():
        pytest.skip("the paper's facts (shared/paper.md) are not beside this checkout")
    section = PAPER.read_text(encoding="utf-8").partition("## Table 3")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:1] == "|"]
    head, published = lines[0], lines[2:]
    rows = table3()
    assert len(published) == len(rows)
    names = {"eps_ls": "eps_ls", "params (1e6)": "params_millions"}
    base = dict(zip(head, published[0], strict=True))
    for cells, row in zip(published, rows, strict=True):
        line = dict(zip(head, cells, strict=True))
        group = line.pop("row")
        assert row["row"].startswith(group.strip("(").split(")")[0])
        assert row["position"] == ("learned" if "learned" in group else "sinusoidal")
        for column, text in line.items():
            own = column in ("PPL", "BLEU", "params (1e6)")  # blank there is nothing, elsewhere as in base
            expected = (text if own else text or base[column]).replace("K", "000")
            assert row[names.get(column, column)] == expected, (row["row"], column)


def test_the_demos_variants_change_what_their_rows_of_the_paper_change(shipped):
    (study, resolved), rows = shipped["demo"], {row["row"]: row for row in table3()}

    def fields(name: str) -> dict:
        config = resolved[f"{name}/seed{study.seeds[0]}"]
        model = {key: value for key, value in config["model"].items() if key in TransformerConfig.__dataclass_fields__}
        whole = TransformerConfig(**model)
        here = {column: getattr(whole, name, None) for column, name in FIELDS.items()}
        return {**here, "eps_ls": config["model"]["label_smoothing"], "steps": config["trainer"]["max_steps"]}

    base = fields("base")
    for variant in study.variants:
        paper = rows[variant.paper or variant.name]
        ours = {key: (value, base[key]) for key, value in fields(variant.name).items() if value != base[key]}
        theirs = {key: (paper[key], rows["base"][key]) for key in base if paper[key] != rows["base"][key]}
        assert ours.keys() == theirs.keys(), variant.name
        for key in ours.keys() - {"position"}:
            less, published = (float(a) < float(b) for a, b in (ours[key], theirs[key]))
            assert less == published, (variant.name, key)


# The same rows at another size


def test_table3_mini_is_table3_at_a_quarter_of_the_width(shipped):
    (whole, big), (mini, small) = shipped["table3"], shipped["table3-mini"]
    assert [v.name for v in mini.variants] == [v.name for v in whole.variants]
    for variant in whole.variants:
        theirs, ours = (found[f"{variant.name}/seed1"] for found in (big, small))
        a, b = (TransformerConfig(**{k: found["model"][k] for k in FIELDS_OF_MODEL}) for found in (theirs, ours))
        for field in ("d_model", "d_ff", "d_k", "d_v"):
            assert getattr(b, field) * 4 == getattr(a, field), (variant.name, field)
        for field in ("num_layers", "num_heads", "dropout", "position"):
            assert getattr(b, field) == getattr(a, field), (variant.name, field)
        assert ours["model"]["label_smoothing"] == theirs["model"]["label_smoothing"]
        ratio = theirs["trainer"]["max_steps"] / 100_000
        assert ours["trainer"]["max_steps"] == small["base/seed1"]["trainer"]["max_steps"] * ratio


FIELDS_OF_MODEL = ("num_layers", "d_model", "d_ff", "num_heads", "d_k", "d_v", "dropout", "position", "max_positions")
ROWS = """
name: rows
config: [base.yaml]
variants: [{name: base}, {name: wide, set: {model.d_ff: 64, trainer.max_steps: 12}}, {name: dk, set: {d_k: 3}}]
"""


def scaled(tmp_path, **fields):
    write(tmp_path)
    (tmp_path / "rows.yaml").write_text(ROWS)
    fields = {"name": "mini", "config": ["base.yaml"], "rows": "rows.yaml", **fields}
    (tmp_path / "mini.yaml").write_text(json.dumps(fields))
    return tmp_path / "mini.yaml"


def test_rows_scale_with_width_and_steps_with_the_base(tmp_path):
    base = {"d_model": 32, "d_ff": 64, "trainer.max_steps": 8}
    study = read_study_file(scaled(tmp_path, width=2.0, set=base))
    assert [variant.set for variant in study.variants] == [
        {},
        {"model.d_ff": 128, "trainer.max_steps": 24},
        {"d_k": 6},
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"width": 2.0}, "need a base of model.d_model = 32, the configuration has 16", id="another base"),
        pytest.param({"width": 0.5, "set": {"d_model": 8, "d_ff": 16}}, "dk: d_k = 3 into 1.5", id="no whole number"),
        pytest.param({"variants": [{"name": "a"}]}, "leave `variants` out", id="rows and variants"),
        pytest.param({"rows": "none.yaml"}, "none.yaml", id="no such study"),
        pytest.param({"set": {"dropout": 0.5}}, "model.dropout = 0.1, the configuration has 0.5", id="another dropout"),
    ],
)
def test_rows_that_cannot_be_had_at_this_size_are_refused(tmp_path, fields, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        read_study_file(scaled(tmp_path, **fields))


def test_rows_of_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match="which must have variants of its own"):
        read_study_file(scaled(tmp_path, rows="mini.yaml"))


def test_a_field_with_and_without_its_group_is_one_field(tmp_path):
    study = with_variants("[{name: a, set: {dropout: 0.0}}]", set="{model.dropout: 0.3}")
    assert checked(write(tmp_path, study), tmp_path / "runs")["a/seed1"]["model"]["dropout"] == 0.0
    with pytest.raises(ValueError, match="a sets a field of the model twice"):
        read_study_file(write(tmp_path, with_variants("[{name: a, set: {dropout: 0.0, model.dropout: 0.3}}]")))


def test_a_study_needs_a_configuration(tmp_path):
    with pytest.raises(ValueError, match="config is empty"):
        read_study_file(write(tmp_path, with_variants("[{name: a}]", config="[]")))


def test_a_width_without_rows_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"width = 2\.0 scales the variants of `rows`"):
        read_study_file(write(tmp_path, with_variants("[{name: a}]", width="2.0")))


# One training scored in several ways, and searches


@pytest.mark.parametrize(
    ("variants", "words"),
    [
        ("[{name: a}, {name: b, trained_by: c}]", "trained_by = 'c' must name a variant of this study"),
        ("[{name: a, trained_by: b}, {name: b, trained_by: a}]", "must name a variant of this study that trains"),
        ("[{name: a}, {name: b, trained_by: a, set: {d_ff: 8}}]", "a trains it, but model.d_ff = 32 there and 8 here"),
    ],
)
def test_a_variant_that_another_one_cannot_train_is_refused(tmp_path, variants, words):
    file = write(tmp_path, with_variants(variants))
    with pytest.raises(ValueError, match=words):
        check(read_study_file(file), file, tmp_path / "runs")


@pytest.mark.parametrize(
    ("search", "words"),
    [
        ("{trials: 0, space: {warmup: {low: 1, high: 2}}}", "trials = 0"),
        ("{trials: 3, space: {}}", "space of 0 keys"),
        ("{trials: 3, space: {warmup: {low: 5, high: 2}}}", "low = 5, high = 2"),
        ("{trials: 3, space: {warmup: {low: 0, high: 2, log: true}}}", "above 0 with log"),
        ("{trials: 3, space: {warmup: {choices: []}}}", "choices = \\[\\]"),
        ("{trials: 3, space: {warmup: {choices: [1], low: 2}}}", "no low, high or log beside"),
        ("{trials: 3, space: {warmup: {low: 0, high: 20}}}", "warmup = 0"),
        ("{trials: 3, space: {wramup: {low: 1, high: 20}}}", "wramup"),
        ("{trials: 3, space: {run.dir: {choices: [a, b]}}}", "run.dir"),
        ("{trials: 3, space: {lr_factor: {low: 1, high: 4}}}", "the key takes decimals"),
        ("{trials: 3, space: {data.vocab_size: {choices: [300, 310]}}}", "trials on other data cannot be compared"),
        ("{trials: 3, prune_after: -1, space: {warmup: {low: 1, high: 2}}}", "prune_after = -1"),
    ],
)
def test_a_search_that_cannot_run_is_refused_before_anything_trains(tmp_path, search, words):
    write(tmp_path)
    (tmp_path / "search.yaml").write_text(f"{{name: s, config: [base.yaml], metric: perplexity, search: {search}}}")
    with pytest.raises(ValueError, match=words):
        check(read_study_file(tmp_path / "search.yaml"), tmp_path / "search.yaml", tmp_path / "runs")


def test_a_search_by_bleu_needs_bleu_at_validations(tmp_path):
    write(tmp_path)
    space = "search: {trials: 2, space: {warmup: {low: 1, high: 2}}}"
    (tmp_path / "search.yaml").write_text(f"{{name: s, config: [base.yaml], set: {{bleu_every: 0}}, {space}}}")
    with pytest.raises(ValueError, match=r"model\.bleu_every = 0 has none"):
        check(read_study_file(tmp_path / "search.yaml"), tmp_path / "search.yaml", tmp_path / "runs")


def test_a_search_makes_its_own_variants(tmp_path):
    search = "{trials: 2, space: {warmup: {low: 1, high: 2}}}"
    with pytest.raises(ValueError, match="leave out variants, rows, more seeds"):
        read_study_file(write(tmp_path, with_variants("[{name: a}]", search=search)))
