"""Results: all files of a study from one reading of its runs, or none; and the command."""

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
from results_folder import ENDINGS, result, scores, variant

from lit_transformer import results
from lit_transformer.__main__ import main
from lit_transformer.results import build

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

    monkeypatch.setattr(results, "differences", broken)
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
    assert whole.files() == before


@pytest.mark.parametrize("which", ENDINGS)
def test_a_folder_where_a_file_belongs_stops_all_of_them(whole, which, capsys):
    whole.add(scores("late", 1, 1.0, 99.0))
    (whole.out / f"s.{which}").unlink()
    (whole.out / f"s.{which}").mkdir()
    before = {file.name: file.read_bytes() for file in whole.out.iterdir() if file.is_file()}
    assert main(["results", "s", "--runs", str(whole.runs), "--out", str(whole.out)]) == 1
    message = capsys.readouterr().err
    assert str(whole.out / f"s.{which}") in message and len(message.splitlines()) == 1
    assert {file.name: file.read_bytes() for file in whole.out.iterdir() if file.is_file()} == before


def test_files_that_were_not_there_are_not_left_by_a_build_that_fails(folder, monkeypatch):
    folder.study(variant("base"))
    replace = results.write_atomic.__globals__["os"].replace

    def breaks(source, target):
        if str(target).endswith("md"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr("os.replace", breaks)
    with pytest.raises(OSError, match="No space"):
        folder.build()
    assert folder.files() == {}


def test_nothing_is_written_into_the_runs(whole):
    """They may lie where they can only be read."""
    whole.build()
    names = {file.name for file in whole.runs.rglob("*") if file.is_file()}
    assert names == {"study.json", "result.json"}


def test_each_file_is_whole_before_the_first_takes_its_name(tmp_path, monkeypatch):
    files = {tmp_path / name: name.encode() for name in ("a", "b", "c")}
    replace, seen = results.write_atomic.__globals__["os"].replace, []

    def watched(source, target):
        seen.append(sorted(path.read_bytes() for path in tmp_path.iterdir()))
        replace(source, target)

    monkeypatch.setattr("os.replace", watched)
    results.write_together(files)
    assert seen == [[b"a", b"b", b"c"]] * 3
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


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
    plot, second = results.differences, []

    def slow(*args):
        if not second:
            whole.add(scores("late", 1, 1.0, 99.0))
            second.append(multiprocessing.get_context("fork").Process(target=_build, args=(whole.runs, whole.out, 1)))
            second[0].start()
            second[0].join(3)
        return plot(*args)

    monkeypatch.setattr(results, "differences", slow)
    whole.build()
    second[0].join(30)
    assert second[0].exitcode == 0
    found = whole.files()
    build(whole.runs, "s", tmp_path / "fresh")
    for ending in ENDINGS:
        assert found[f"s.{ending}"] == (tmp_path / "fresh" / f"s.{ending}").read_bytes(), ending


# The command


def test_the_command_prints_the_table_and_where_it_is(whole, capsys):
    assert main(["results", "s", "--runs", str(whole.runs), "--out", str(whole.out)]) == 0
    printed = capsys.readouterr().out
    assert whole.markdown in printed
    assert (whole.out / "s.md").read_text(encoding="utf-8") == whole.markdown
    assert str(whole.out / "s.csv") in printed


def test_tables_need_none_of_the_libraries_that_train():
    check = (
        "import sys, lit_transformer.results as r; sys.exit(bool({'torch', 'lightning', 'optuna'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_a_study_that_is_named_compare_can_be_asked_for(whole, capsys):
    (whole.runs / "s").rename(whole.runs / "compare")
    assert main(["results", "--runs", str(whole.runs), "--out", str(whole.out), "--", "compare"]) == 0
    assert (whole.out / "compare.md").is_file()
