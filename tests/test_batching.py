"""UpdatePlan as a pure function: what an update holds, and how it is split for any number of ranks."""

import numpy as np
import pytest

from lit_transformer.batching import UpdatePlan, evaluation_batches

WORLDS = (1, 2, 3, 8)


def lengths(n=2000, seed=0, longest=60):
    rng = np.random.default_rng(seed)
    src = np.clip(rng.lognormal(2.9, 0.6, n), 2, longest).astype(int)
    return src, np.clip(src * rng.lognormal(0.0, 0.25, n), 2, longest).astype(int)


def plan(tokens=1000, seed=1, **kwargs):
    return UpdatePlan(*lengths(**kwargs), tokens, seed)


def epoch_updates(p, epoch):
    return [p.update(n) for n in range(epoch * p.updates_per_epoch, (epoch + 1) * p.updates_per_epoch)]


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_an_epoch_uses_every_sentence_once(epoch):
    p = plan()
    used = np.concatenate([u.sentences for u in epoch_updates(p, epoch)])
    assert sorted(used.tolist()) == list(range(2000))
    assert {u.epoch for u in epoch_updates(p, epoch)} == {epoch}


def test_updates_hold_about_the_tokens_asked_for():
    p = plan(tokens=1000)
    src, tgt = lengths()
    both = [int(src[u.sentences].sum() + tgt[u.sentences].sum()) for u in epoch_updates(p, 0)]
    assert np.mean(both) == pytest.approx(2000, rel=0.02)
    # No small remainder: every update is within two longest sentences of the mean.
    assert max(both) - min(both) <= 2 * (60 + 60)


def test_update_tokens_are_the_target_tokens_of_its_sentences():
    _, tgt = lengths()
    for u in epoch_updates(plan(), 0):
        assert u.tgt_tokens == sum(tgt[i] for i in u.sentences.tolist())


def test_same_seed_same_lists_other_seed_other_lists_and_epochs_differ():
    def ids(seed, epoch):
        return [u.sentences.tolist() for u in epoch_updates(plan(seed=seed), epoch)]

    assert ids(1, 0) == ids(1, 0)
    assert ids(1, 0) != ids(2, 0)
    assert ids(1, 0) != ids(1, 1)
    assert sorted(map(sorted, ids(1, 0))) != sorted(map(sorted, ids(1, 1)))  # not only the order of the updates


def test_an_update_does_not_depend_on_what_was_asked_before():
    p, q = plan(), plan()
    for n in (7, 300, 3, 41, 7):
        p.update(n)
    assert p.update(41).sentences.tolist() == q.update(41).sentences.tolist()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("max_tokens", [60, 100, 333, 5000])
def test_a_split_keeps_every_sentence_within_the_budget(world, max_tokens):
    p = plan()
    src, tgt = lengths()
    parts = world * p.accumulation(world, max_tokens)
    for n in range(2 * p.updates_per_epoch):  # the accumulation is that of epoch 0 and must do for all
        update = p.update(n)
        pieces = p.split(update, parts, max_tokens)
        assert len(pieces) == parts
        assert np.concatenate(pieces).tolist() == update.sentences.tolist()
        for piece in pieces:
            if len(piece):
                assert len(piece) * max(src[piece].max(), tgt[piece].max()) <= max_tokens


def brute_force_fewest(sizes, budget):
    """Fewest consecutive runs within the budget, by dynamic programming."""
    best = [0] + [10**9] * len(sizes)
    for end in range(1, len(sizes) + 1):
        for start in range(end):
            if (end - start) * max(sizes[start:end]) <= budget:
                best[end] = min(best[end], best[start] + 1)
    return best[-1]


@pytest.mark.parametrize("max_tokens", [60, 100, 333])
def test_accumulation_is_the_fewest_that_suffices(max_tokens):
    p = plan(n=400)
    src, tgt = lengths(n=400)
    sizes = np.maximum(src, tgt)
    needed = max(brute_force_fewest(sizes[u.sentences].tolist(), max_tokens) for u in epoch_updates(p, 0))
    for world in WORLDS:
        assert p.accumulation(world, max_tokens) == -(-needed // world)


def test_a_split_is_balanced():
    p = plan(tokens=4000)
    src, tgt = lengths()
    sizes = np.maximum(src, tgt)
    for n in range(p.updates_per_epoch):
        update = p.update(n)
        pieces = p.split(update, 4, 5000)
        costs = [len(piece) * sizes[piece].max() for piece in pieces if len(piece)]
        # No split into four consecutive runs has a smaller largest run.
        assert brute_force_fewest(sizes[update.sentences].tolist(), max(costs) - 1) > 4


def test_more_ranks_than_sentences_leaves_some_empty():
    p = UpdatePlan(np.array([3, 4]), np.array([4, 3]), 10, 1)
    pieces = p.split(p.update(0), 8, 10)
    assert sorted(len(piece) for piece in pieces) == [0] * 6 + [1, 1]


def test_a_sentence_longer_than_an_update_is_an_update_of_its_own():
    src = tgt = np.array([50, 2, 2, 2, 2])
    p = UpdatePlan(src, tgt, 5, 1)
    used = np.concatenate([u.sentences for u in epoch_updates(p, 0)])
    assert sorted(used.tolist()) == [0, 1, 2, 3, 4]
    assert all(len(u.sentences) for u in epoch_updates(p, 0))


def test_similar_lengths_stand_together():
    src, tgt = lengths(n=20000)
    p = UpdatePlan(src, tgt, 1000, 1)
    padded = real = 0
    for u in epoch_updates(p, 0):
        for side in (src, tgt):
            padded += len(u.sentences) * side[u.sentences].max()
            real += side[u.sentences].sum()
    assert 1 - real / padded < 0.05


@pytest.mark.parametrize("updates", [0, 1, 17, 139, 300])
def test_uses_counts_what_the_updates_hold(updates):
    p = plan()
    counts = np.zeros(2000, int)
    for n in range(updates):
        counts[p.update(n).sentences] += 1
    assert p.uses(updates).tolist() == counts.tolist()


def test_wrong_sizes_are_refused_with_their_values():
    with pytest.raises(ValueError, match=r"max_tokens = 20 .* 60 tokens"):
        UpdatePlan(np.array([60]), np.array([3]), 10, 1).accumulation(1, 20)
    with pytest.raises(ValueError, match="tokens_per_update = 0"):
        plan(tokens=0)
    with pytest.raises(ValueError, match="0 source"):
        UpdatePlan(np.array([]), np.array([]), 10, 1)
    p = plan()
    with pytest.raises(ValueError, match="does not fit"):
        p.split(p.update(0), 1, 60)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("n", [0, 1, 2, 7, 500])
def test_evaluation_covers_each_sentence_once_with_as_many_batches_on_each_rank(world, n):
    sizes = np.random.default_rng(n).integers(1, 90, n)
    ranks = evaluation_batches(sizes, 60, world)
    assert len({len(batches) for batches in ranks}) == 1
    ids = [i for batches in ranks for batch in batches for i in batch.tolist()]
    assert sorted(ids) == list(range(n))
    for batches in ranks:
        for batch in batches:
            # Beyond the budget only where a sentence alone is.
            assert len(batch) <= 1 or len(batch) * sizes[batch].max() <= 60
