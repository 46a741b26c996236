"""Curves over several sessions of a run."""

import math

import pytest

from lit_transformer.curves import read_curves


def session(run, number, text):
    folder = run / "csv" / f"version_{number}"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(text)


def test_sessions_join_at_the_checkpoint_and_the_later_one_counts(tmp_path):
    session(tmp_path, 0, "step,train_nll,val_nll\n50,5.0,\n100,4.0,4.5\n150,3.9,\n")
    session(tmp_path, 1, "step,train_nll,val_nll\n150,3.5,\n200,3.0,3.2\n")
    assert read_curves(tmp_path) == {
        "train_nll": {50: 5.0, 100: 4.0, 150: 3.5, 200: 3.0},
        "val_nll": {100: 4.5, 200: 3.2},
    }


def test_the_tenth_session_comes_after_the_second(tmp_path):
    for number in (2, 10):
        session(tmp_path, number, f"step,val_nll\n100,{number}.5\n")
    assert read_curves(tmp_path) == {"val_nll": {100: 10.5}}


def test_columns_in_another_order_are_read_by_their_names(tmp_path):
    session(tmp_path, 0, "a,step,epoch,b\n1.0,10,0,2.0\n")
    assert read_curves(tmp_path) == {"a": {10: 1.0}, "b": {10: 2.0}}


@pytest.mark.parametrize("cut", ["3.0", "3.0,2", "3.0,20", "3.0,20,", "3.0,20,4"])
def test_a_line_that_is_being_written_is_left_for_later(tmp_path, cut):
    session(tmp_path, 0, f"a,step,b\n1.0,10,2.0\n{cut}")
    assert read_curves(tmp_path) == {"a": {10: 1.0}, "b": {10: 2.0}}


def test_values_that_are_no_numbers_stay_visible_as_such(tmp_path):
    session(tmp_path, 0, "step,a\n1,inf\n2,nan\n3,oops\n")
    curve = read_curves(tmp_path)["a"]
    assert curve[1] == math.inf and math.isnan(curve[2]) and math.isnan(curve[3])


def test_a_run_that_has_not_begun_has_no_curves(tmp_path):
    assert read_curves(tmp_path) == {}
    session(tmp_path, 0, "")
    assert read_curves(tmp_path) == {}
