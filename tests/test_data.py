"""Batches as each rank takes them; ids, padding, and what Lightning must leave alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import Seen, make_data, make_module, make_trainer, train, write_corpus

from lit_transformer import data as data_module
from lit_transformer.data import EvaluationBatches, TrainingBatches, collate
from lit_transformer.tokenizer import BOS_ID, EOS_ID, PAD_ID


def prepared(corpus, **options):
    data = make_data(corpus, **options)
    data.prepare_data()
    data.setup("fit")
    return data


def test_collate_frames_and_pads_on_the_right():
    batch = collate([np.array([7, 8]), np.array([9])], [np.array([5]), np.array([6, 4, 5])], 6)
    assert batch.src.tolist() == [[7, 8, EOS_ID], [9, EOS_ID, PAD_ID]]
    assert batch.tgt_in.tolist() == [[BOS_ID, 5, PAD_ID, PAD_ID], [BOS_ID, 6, 4, 5]]
    assert batch.tgt_out.tolist() == [[5, EOS_ID, PAD_ID, PAD_ID], [6, 4, 5, EOS_ID]]
    assert batch.update_tokens.item() == 6


def test_an_empty_micro_batch_is_padding_alone():
    batch = collate([], [], 6)
    # The frame of an empty sentence would be learned from; padding is not.
    assert batch.src.tolist() == batch.tgt_in.tolist() == batch.tgt_out.tolist() == [[PAD_ID]]


def rows(batch):
    """Pairs of a batch as tuples of ids without padding."""
    pairs = zip(batch.src.tolist(), batch.tgt_out.tolist(), strict=True)
    return [tuple(tuple(i for i in side if i != PAD_ID) for side in pair) for pair in pairs if any(pair[1])]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("max_tokens", [400, 40])
def test_ranks_share_each_update_without_overlap(corpus, world, max_tokens):
    data = prepared(corpus)
    accumulation = data.plan.accumulation(world, max_tokens)
    ranks = [TrainingBatches(data.store, data.plan, max_tokens, accumulation, rank, world) for rank in range(world)]
    src, tgt = data.sentences("train", "src"), data.sentences("train", "tgt")
    for n in range(3):
        update = data.plan.update(n)
        batches = [ranks[rank][n * accumulation + slot] for rank in range(world) for slot in range(accumulation)]
        found = sorted(pair for batch in batches for pair in rows(batch))
        wanted = sorted(((*src[i].tolist(), EOS_ID), (*tgt[i].tolist(), EOS_ID)) for i in update.sentences.tolist())
        assert found == wanted
        assert {batch.update_tokens.item() for batch in batches} == {sum(len(t) for _, t in wanted)}
        assert all(batch.src.numel() <= max_tokens for batch in batches)
        assert all(batch.tgt_in.numel() <= max_tokens for batch in batches)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_evaluation_scores_each_sentence_once_over_all_ranks(corpus, world, monkeypatch):
    monkeypatch.setattr(data_module, "EVALUATION_TOKENS", 40)
    data = prepared(corpus)
    ranks = [EvaluationBatches(data.store, "valid", rank, world) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    found = [pair for batches in ranks for k in range(len(batches)) for pair in rows(batches[k])]
    wanted = zip(data.sentences("valid", "src"), data.sentences("valid", "tgt"), strict=True)
    assert sorted(found) == sorted(((*s.tolist(), EOS_ID), (*t.tolist(), EOS_ID)) for s, t in wanted)


def test_references_are_the_text_as_given_and_sources_stand_in_its_order(corpus):
    data = prepared(corpus)
    with open(corpus["valid"][1], encoding="utf-8") as file:
        assert data.references("valid") == file.read().split("\n")[:-1]
    with open(corpus["valid"][0], encoding="utf-8") as file:
        assert [data.tokenizer.decode(ids) for ids in data.sources("valid")] == file.read().split("\n")[:-1]


def test_lightning_gets_the_planned_batches_and_no_sampler_of_its_own(corpus):
    taken = []

    class Note(Seen):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            taken.append(rows(batch))

    # Default flags of the Trainer, use_distributed_sampler included.
    _, trainer = train(corpus, max_steps=7, callbacks=[Note()])
    plan = prepared(corpus).plan
    batches = TrainingBatches(prepared(corpus).store, plan, 400, trainer.accumulate_grad_batches, 0, 1)
    assert taken == [rows(batches[k]) for k in range(7 * trainer.accumulate_grad_batches)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_loader_starts_at_the_update_reached(corpus, workers):
    data = prepared(corpus, num_workers=workers)
    data.trainer = SimpleNamespace(max_steps=9, global_step=5, accumulate_grad_batches=2, global_rank=0, world_size=1)
    loader = data.train_dataloader()
    wanted = TrainingBatches(data.store, data.plan, 400, 2, 0, 1)
    assert len(loader) == 18
    assert [rows(batch) for batch in loader] == [rows(wanted[k]) for k in range(10, 18)]


def test_training_without_a_number_of_updates_is_refused(corpus):
    with pytest.raises(ValueError, match="max_steps = -1"):
        make_trainer(max_steps=-1, max_epochs=1).fit(make_module(), datamodule=make_data(corpus))


def test_a_training_sentence_beyond_the_budget_is_refused_at_setup(corpus):
    with pytest.raises(ValueError, match="max_tokens = 5 is less than the longest training sentence"):
        train(corpus, data={"max_tokens": 5})


def test_a_validation_sentence_beyond_the_budget_is_a_batch_of_its_own(corpus):
    data = make_data(corpus, max_tokens=5)
    module = make_module()
    make_trainer().validate(module, datamodule=data, verbose=False)
    assert module.evaluation.tokens == sum(len(t) + 1 for t in data.sentences("valid", "tgt"))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"tokens_per_update": 150}, "tokens_per_update"), ({"seed": 2}, "seed"), ({"max_length": 20}, "data")],
)
def test_a_checkpoint_refuses_other_data_budget_or_seed(corpus, tmp_path, options, words):
    train(corpus, tmp_path, max_steps=2)
    with pytest.raises(ValueError, match=f"{words} = "):
        train(corpus, tmp_path, data=options, max_steps=4)


def test_other_text_of_the_same_name_is_other_data(corpus, tmp_path):
    train(corpus, tmp_path / "run", max_steps=2)
    other = write_corpus(tmp_path / "text", seed=5)
    with pytest.raises(ValueError, match="data = "):
        train({**corpus, **other}, tmp_path / "run", max_steps=4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"num_workers": -1}, "num_workers = -1"),
        ({"vocab_size": 0}, "vocab_size"),
    ],
)
def test_wrong_options_are_named(corpus, options, words):
    with pytest.raises(ValueError, match=words):
        make_data(corpus, **options)


def test_an_unknown_option_is_refused(corpus):
    with pytest.raises(TypeError, match="max_lenght"):
        make_data(corpus, max_lenght=3)


def test_ids_are_integers_of_64_bits():
    batch = collate([np.array([4], np.uint16)], [np.array([5], np.uint16)], 1)
    assert {t.dtype for t in batch} == {torch.int64}
