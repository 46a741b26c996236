"""Search against enumeration, hand-made cases and a slow search of one sentence in plain lists."""

import itertools
import math
import random
from dataclasses import dataclass

import pytest
import torch

from lit_transformer.decode import Hypothesis, beam_search, greedy_search, length_normaliser, pad, search_all
from lit_transformer.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from lit_transformer.transformer import Transformer, TransformerConfig

BANNED = {PAD_ID, UNK_ID, BOS_ID}
# ids of the hand-made models
BOS, EOS, A, B = 0, 1, 2, 3
IDS = {"bos_id": BOS, "eos_id": EOS, "banned_ids": (BOS,)}


def lp(length, alpha):
    return ((5 + length) / 6) ** alpha


@dataclass
class Prefixes:
    """State of a TableModel: what it has been fed, one prefix for each beam."""

    sentences: list
    prefixes: list

    def select(self, beams, sentences=None):
        self.prefixes = [self.prefixes[i] for i in beams.tolist()]
        if sentences is not None:
            self.sentences = [self.sentences[i] for i in sentences.tolist()]


class TableModel:
    """Logits are any function of the sentence's number, its first source id, and the whole prefix with BOS."""

    def __init__(self, table, max_length=None):
        self.table, self.max_length, self.steps = table, max_length, 0

    def start(self, src):
        return Prefixes(src[:, 0].tolist(), [])

    def step(self, tokens, state):
        self.steps += 1
        width = tokens.size(1)
        prefixes = state.prefixes or [()] * tokens.numel()
        state.prefixes = [(*p, t) for p, t in zip(prefixes, tokens.flatten().tolist(), strict=True)]
        rows = [self.table(state.sentences[i // width], prefix) for i, prefix in enumerate(state.prefixes)]
        return torch.tensor(rows).view(*tokens.shape, -1)


def random_table(seed, vocab_size=4, spread=1.5):
    def table(sentence, prefix):
        generator = random.Random(f"{seed} {sentence} {prefix}")
        return [generator.gauss(0, spread) for _ in range(vocab_size)]

    return table


def never_ends(table):
    def without_eos(sentence, prefix):
        logits = table(sentence, prefix)
        logits[EOS] = -math.inf
        return logits

    return without_eos


def log_prob_of(table, sentence, prefix, token):
    logits = table(sentence, prefix)
    return logits[token] - math.log(sum(math.exp(x) for x in logits))


def enumerate_all(table, sentence, limit, alpha, letters=(A, B)):
    """Every finished sequence of at most `limit` tokens, and every unfinished one of `limit`, best first."""
    finished, unfinished = [], []
    for length in range(limit + 1):
        for ids in itertools.product(letters, repeat=length):
            ends = length < limit
            tokens = (*ids, EOS) if ends else ids
            total = sum(log_prob_of(table, sentence, (BOS, *tokens[:i]), token) for i, token in enumerate(tokens))
            (finished if ends else unfinished).append(Hypothesis(ids, total, total / lp(len(tokens), alpha), ends))
    return [sorted(group, key=lambda h: -h.score) for group in (finished, unfinished)]


def assert_same(found, expected, tolerance=1e-5):
    assert [h.ids for h in found] == [h.ids for h in expected]
    assert [h.finished for h in found] == [h.finished for h in expected]
    assert [h.log_prob for h in found] == pytest.approx([h.log_prob for h in expected], abs=tolerance)
    assert [h.score for h in found] == pytest.approx([h.score for h in expected], abs=tolerance)


def sources(*numbers):
    return torch.tensor([[n, EOS_ID] for n in numbers])


# Against enumeration


@pytest.mark.parametrize(("length", "alpha", "value"), [(1, 0.6, 1.0), (7, 1.0, 2.0), (19, 0.5, 2.0), (30, 0.0, 1.0)])
def test_length_normaliser_by_hand(length, alpha, value):
    assert length_normaliser(length, alpha) == pytest.approx(value)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_beam_wide_enough_equals_full_enumeration(seed, alpha):
    table = random_table(seed)
    numbers = [7, 8, 9]
    found = beam_search(TableModel(table, 5), sources(*numbers), beam_size=64, n_best=63, length_penalty=alpha, **IDS)
    for number, hypotheses in zip(numbers, found, strict=True):
        finished, unfinished = enumerate_all(table, number, 5, alpha)
        assert (len(finished), len(unfinished)) == (31, 32)
        assert_same(hypotheses, finished + unfinished)


@pytest.mark.parametrize("n_best", [1, 2, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("seed", range(10))
def test_stopping_early_loses_nothing_that_enumeration_finds(seed, alpha, n_best):
    table = random_table(seed)
    numbers = list(range(4, 12))
    found = beam_search(
        TableModel(table, 5), sources(*numbers), beam_size=32, n_best=n_best, length_penalty=alpha, **IDS
    )
    for number, hypotheses in zip(numbers, found, strict=True):
        assert_same(hypotheses, enumerate_all(table, number, 5, alpha)[0][:n_best])


def test_without_a_penalty_scores_are_plain_log_probabilities():
    table = random_table(1)
    for hypothesis in beam_search(TableModel(table, 5), sources(4), beam_size=64, n_best=40, length_penalty=0, **IDS)[
        0
    ]:
        assert hypothesis.score == hypothesis.log_prob


def test_nothing_banned_searches_the_whole_vocabulary():
    table = random_table(3)
    found = beam_search(
        TableModel(table, 3), sources(4), beam_size=27, n_best=13, bos_id=BOS, eos_id=EOS, banned_ids=()
    )
    finished, _ = enumerate_all(table, 4, 3, 0.6, (BOS, A, B))
    assert len(finished) == 13
    assert_same(found[0], finished)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
@pytest.mark.parametrize("beam_size", [4, 7])
def test_the_first_hypothesis_does_not_depend_on_n_best(alpha, beam_size):
    numbers = list(range(4, 64))
    table = random_table(11, vocab_size=6)
    one, four = (
        beam_search(TableModel(table, 9), sources(*numbers), beam_size=beam_size, n_best=n, length_penalty=alpha, **IDS)
        for n in (1, 4)
    )
    assert [len(hypotheses) for hypotheses in four] == [4] * len(numbers)
    assert [hypotheses[:1] for hypotheses in four] == one
    assert len({hypotheses[0].ids for hypotheses in one}) > 10


def test_n_best_are_distinct_and_stand_in_order():
    for hypotheses in beam_search(TableModel(random_table(5, 6), 8), sources(*range(4, 24)), n_best=4, **IDS):
        assert len({(h.ids, h.finished) for h in hypotheses}) == 4
        keys = [(not h.finished, -h.score) for h in hypotheses]
        assert keys == sorted(keys)


# No end of sentence


@pytest.mark.parametrize("forbid", ["banned", "minus infinity"])
@pytest.mark.parametrize("n_best", [1, 3])
def test_without_an_end_the_best_unfinished_hypothesis_is_flagged(forbid, n_best):
    numbers = [4, 5, 6]
    table = random_table(2)
    ids = {**IDS, "banned_ids": (BOS, EOS)}
    if forbid == "minus infinity":
        table, ids = never_ends(table), IDS
    found = beam_search(TableModel(table, 5), sources(*numbers), beam_size=32, n_best=n_best, **ids)
    assert len(found) == 3
    for number, hypotheses in zip(numbers, found, strict=True):
        assert_same(hypotheses, enumerate_all(table, number, 5, 0.6)[1][:n_best])


def test_a_sentence_that_never_ends_leaves_the_others_alone():
    plain = random_table(4)

    def table(sentence, prefix):
        return (never_ends(plain) if sentence == 5 else plain)(sentence, prefix)

    for search in (beam_search, greedy_search):
        together = search(TableModel(table, 5), sources(4, 5, 6), **IDS)
        assert together == [search(TableModel(table, 5), sources(number), **IDS)[0] for number in (4, 5, 6)]
        unfinished = together[1] if search is greedy_search else together[1][0]
        assert not unfinished.finished
        assert len(unfinished.ids) == 5


def test_cut_hypotheses_stand_behind_the_finished_ones():
    # EOS only as the first token and improbable: one finished hypothesis, worse than those cut at the limit
    def table(sentence, prefix):
        return [0.0, -5.0 if len(prefix) == 1 else -math.inf, 1.0, 1.5]

    four = beam_search(TableModel(table, 3), sources(4), n_best=4, **IDS)[0]
    assert [h.finished for h in four] == [True, False, False, False]
    assert four[0].ids == ()
    assert four[1].ids == (B, B, B)
    assert four[0].score < four[1].score
    assert beam_search(TableModel(table, 3), sources(4), n_best=1, **IDS)[0] == four[:1]


# Overtaking and stopping

REST = 1e-9


def scripted(chances):
    """chances(prefix) gives the probabilities of EOS, A and B; BOS keeps next to nothing."""

    def table(sentence, prefix):
        return [math.log(REST), *(math.log(max(p, REST)) for p in chances(prefix[1:]))]

    return table


def test_a_longer_hypothesis_overtakes_and_the_search_then_stops():
    # Step 1 finishes "" with log .52 = -.654; A, at log .46 = -.777, is behind both as it stands and at its length.
    # A then goes on with .99 five times and ends at step 6 with .46 * .99^5 (.437): -.827 / (11/6)^.6 = -.575.
    # What is still live then has at most .46 * .99^4 * .01: -5.42 / (15/6)^.6 = -3.13 at the limit of 10: stop.
    def chances(prefix):
        if prefix == ():
            return 0.52, 0.46, 0.02
        if prefix == (A,) * len(prefix) and len(prefix) < 5:
            return 0.005, 0.99, 0.005
        return (0.99, 0.005, 0.005) if prefix == (A,) * 5 else (0.1, 0.45, 0.45)

    model = TableModel(scripted(chances), 10)
    (winner,) = beam_search(model, sources(4), beam_size=2, **IDS)[0]
    assert winner.ids == (A,) * 5
    assert winner.finished
    assert winner.log_prob == pytest.approx(-0.8268, abs=1e-4)
    assert winner.score == pytest.approx(-0.5747, abs=1e-4)
    assert model.steps == 6


def fading(prefix):
    # "" ends at once with .6; A has .35 and keeps .8 of it at each step, the rest is split and never wins
    return (0.6, 0.35, 0.05) if prefix == () else (0.1, 0.8, 0.1)


@pytest.mark.parametrize(
    ("max_length", "alpha", "steps"),
    [
        # Limit 5 + 50: a live one must beat log .6 * (60/6)^.6 = -.5108 * 3.981 = -2.034.  A has log .35 = -1.050 and
        # loses .2231 a step: -1.942 at step 5 still can, -2.165 at step 6 cannot.
        (None, 0.6, 6),
        # limit 10: -.5108 * (15/6)^.6 = -.885, below which A stands from the start
        (10, 0.6, 1),
        # limit 30: -.5108 * (35/6)^.6 = -1.472, between -1.273 at step 2 and -1.496 at step 3
        (30, 0.6, 3),
        # no penalty: .35 < .6
        (None, 0.0, 1),
        # -.5108 * (60/6)^1 = -5.108: -1.050 - 18 * .2231 = -5.066 at step 19 still can, -5.289 at step 20 cannot
        (None, 1.0, 20),
    ],
)
def test_the_search_stops_as_soon_as_no_live_hypothesis_can_win(max_length, alpha, steps):
    model = TableModel(scripted(fading), max_length)
    (winner,) = beam_search(model, torch.tensor([[4, 5, 6, 7, EOS_ID]]), beam_size=2, length_penalty=alpha, **IDS)[0]
    assert winner.ids == ()
    assert winner.log_prob == pytest.approx(math.log(0.6), abs=1e-5)
    assert model.steps == steps


def test_more_hypotheses_wanted_are_more_steps():
    # The second best is AAA.. or B with an end: the search goes on for it where n_best 1 had stopped.
    one, two = TableModel(scripted(fading), 10), TableModel(scripted(fading), 10)
    beam_search(one, sources(4), n_best=1, **IDS)
    beam_search(two, sources(4), n_best=2, **IDS)
    assert one.steps < two.steps


def test_a_finished_sentence_is_no_longer_searched():
    # Sentence 4 ends at step 1, sentence 5 with the tenth token: from step 2 on only the latter is fed.
    def table(sentence, prefix):
        ends = sentence == 4 or len(prefix) == 10
        return [-20.0, 10.0 if ends else -20.0, -20.0 if ends else 10.0, -20.0]

    class Watched(TableModel):
        def step(self, tokens, state):
            fed.append(len(tokens))
            return super().step(tokens, state)

    for search in (beam_search, greedy_search):
        fed = []
        search(Watched(table), sources(4, 5), **IDS)
        assert fed == [2] + [1] * 9


# The limit


@pytest.mark.parametrize(("max_length", "limits"), [(None, [51, 54, 60]), (30, [30, 30, 30]), (54, [51, 54, 54])])
def test_the_limit_is_the_input_and_50_within_what_the_model_allows(max_length, limits):
    src = torch.tensor([[EOS_ID, *[PAD_ID] * 10], [4, 5, 6, EOS_ID, *[PAD_ID] * 7], [4] * 9 + [EOS_ID, PAD_ID]])
    model = TableModel(never_ends(random_table(1)), max_length)
    found = beam_search(model, src, beam_size=2, **IDS)
    assert [len(hypotheses[0].ids) for hypotheses in found] == limits
    assert [len(h.ids) for h in greedy_search(TableModel(model.table, max_length), src, **IDS)] == limits
    assert model.steps == max(limits)


def test_an_end_at_the_limit_is_an_end():
    def table(sentence, prefix):
        return [-20.0, 10.0 if len(prefix) == 5 else -math.inf, 5.0, -20.0]

    for limit, finished in ((5, True), (4, False)):
        (beam,) = beam_search(TableModel(table, limit), sources(4), **IDS)[0]
        (greedy,) = greedy_search(TableModel(table, limit), sources(4), **IDS)
        for hypothesis in (beam, greedy):
            assert hypothesis.ids == (A, A, A, A)
            assert hypothesis.finished == finished


def test_a_60_token_input_may_have_a_60_token_output():
    # copies its length: 59 tokens and EOS from 59 tokens and EOS
    def table(sentence, prefix):
        return [-20.0, 10.0 if len(prefix) == 60 else -20.0, 10.0, -20.0]

    src = torch.tensor([[4] * 59 + [EOS_ID]])
    (winner,) = beam_search(TableModel(table), src, **IDS)[0]
    assert winner.finished
    assert winner.ids == (A,) * 59


# On a Transformer

VOCAB = 14


class Ending(Transformer):
    """Its logit of EOS grows by a half with every position: random weights alone end at once or never."""

    late = 8  # the position at which nothing is added

    def forward(self, src, tgt_in):
        logits = super().forward(src, tgt_in)
        logits[..., EOS_ID] += (torch.arange(tgt_in.size(1)) - self.late) / 2
        return logits

    def step(self, tokens, state):
        position = state.length
        logits = super().step(tokens, state)
        logits[..., EOS_ID] += (position - self.late) / 2
        return logits


def transformer(seed, **changes):
    """A small random model, certain enough of its outputs that they differ between inputs."""
    torch.manual_seed(seed)
    settings = {"vocab_size": VOCAB, "num_layers": 1, "d_model": 16, "d_ff": 24, "num_heads": 2, "dropout": 0.0}
    model = Ending(TransformerConfig(**{**settings, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    return model


def random_sources(seed, lengths):
    generator = random.Random(seed)
    return [[*(generator.randrange(4, VOCAB) for _ in range(length - 1)), EOS_ID] for length in lengths]


def forced_log_probs(model, source, prefixes):
    """Teacher forcing without a cache: log-probabilities after each prefix, all of one length, without BOS."""
    src = torch.tensor([source]).expand(len(prefixes), -1)
    with torch.no_grad():
        logits = model(src, torch.tensor([[BOS_ID, *prefix] for prefix in prefixes]))
    return logits[:, -1].double().log_softmax(-1).tolist()


def slow_beam_search(model, source, width, alpha, n_best):
    """No cache, no batch, no early stop: every step up to the limit, all ends kept and sorted at the last."""
    limit = min(len(source) + 50, model.max_length or 10**9)
    live, ends = [(0.0, ())], []
    for length in range(1, limit + 1):
        rows = forced_log_probs(model, source, [ids for _, ids in live])
        grown = [
            (total + row[token], (*ids, token))
            for (total, ids), row in zip(live, rows, strict=True)
            for token in range(VOCAB)
            if token not in BANNED
        ]
        grown = sorted(grown, reverse=True)[: 2 * width]
        ends += [Hypothesis(ids[:-1], t, t / lp(length, alpha), True) for t, ids in grown if ids[-1] == EOS_ID]
        live = [(t, ids) for t, ids in grown if ids[-1] != EOS_ID][:width]
    ends.sort(key=lambda h: -h.score)
    return (ends + [Hypothesis(ids, t, t / lp(limit, alpha), False) for t, ids in live])[:n_best]


class Counted:
    """A model whose steps are counted."""

    def __init__(self, model):
        self.model, self.max_length, self.start, self.steps = model, model.max_length, model.start, 0

    def step(self, tokens, state):
        self.steps += 1
        return self.model.step(tokens, state)


@pytest.mark.parametrize(
    ("width", "n_best", "alpha"), [(4, 1, 0.6), (4, 4, 0.6), (2, 2, 1.0), (5, 1, 0.0), (1, 1, 0.6)]
)
@pytest.mark.parametrize("seed", range(3))
def test_search_equals_a_slow_one_without_cache_batch_or_early_stop(seed, width, n_best, alpha):
    model = transformer(seed)
    inputs = random_sources(seed, [6, 1, 9, 3])
    counted = Counted(model)
    found = beam_search(counted, pad(inputs), beam_size=width, length_penalty=alpha, n_best=n_best)
    for source, hypotheses in zip(inputs, found, strict=True):
        assert_same(hypotheses, slow_beam_search(model, source, width, alpha, n_best), 1e-4)
    if n_best == 1:
        assert counted.steps < 59  # it did stop early, so the comparison says something


def test_the_random_models_give_outputs_of_many_lengths():
    # else the comparisons of this file would be about next to nothing
    found = [h[0] for seed in range(3) for h in search_all(transformer(seed), random_sources(seed, range(1, 13)))]
    assert len({len(h.ids) for h in found}) >= 5
    assert len({h.ids for h in found}) >= 12


def test_a_wide_beam_over_a_transformer_equals_full_enumeration():
    model = transformer(4, vocab_size=7, position="learned", max_positions=4)
    sequences = [
        (*ids, EOS_ID) if length < 4 else ids
        for length in range(5)
        for ids in itertools.product((4, 5, 6), repeat=length)
    ]
    for source in ([4, 6, EOS_ID], [5, EOS_ID]):
        expected = []
        for tokens in sequences:
            with torch.no_grad():
                logits = model(torch.tensor([source]), torch.tensor([[BOS_ID, *tokens[:-1]]]))[0]
            chosen = (
                logits.double().log_softmax(-1)[range(len(tokens)), list(tokens)] if tokens else logits.new_zeros(1)
            )
            total, finished = chosen.sum().item(), tokens[-1] == EOS_ID
            ids = tokens[:-1] if finished else tokens
            expected.append(Hypothesis(ids, total, total / lp(len(tokens), 0.6), finished))
        expected.sort(key=lambda h: (not h.finished, -h.score))
        (found,) = beam_search(model, torch.tensor([source]), beam_size=121, n_best=121)
        assert len(expected) == 1 + 3 + 9 + 27 + 81
        assert_same(found, expected, 1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_those_of_teacher_forcing(seed):
    model = transformer(seed, position="learned", max_positions=12)
    inputs = random_sources(seed, [5, 2, 8, 1, 11])
    kinds = set()
    for source, hypotheses in zip(inputs, beam_search(model, pad(inputs), n_best=4), strict=True):
        for hypothesis in hypotheses:
            tokens = [*hypothesis.ids, *[EOS_ID] * hypothesis.finished]
            total = sum(forced_log_probs(model, source, [tokens[:i]])[0][token] for i, token in enumerate(tokens))
            assert hypothesis.log_prob == pytest.approx(total, abs=1e-4)
            assert hypothesis.score == pytest.approx(hypothesis.log_prob / lp(len(tokens), 0.6), rel=1e-6)
            kinds.add(hypothesis.finished)
    assert kinds == {True, False}


@pytest.mark.parametrize("seed", range(4))
def test_greedy_equals_an_argmax_loop_with_teacher_forcing(seed):
    model = transformer(seed)
    inputs = random_sources(seed, [6, 1, 9, 3, 12])
    found = greedy_search(model, pad(inputs))
    for source, hypothesis in zip(inputs, found, strict=True):
        tokens, total = [], 0.0
        while len(tokens) < len(source) + 50 and (not tokens or tokens[-1] != EOS_ID):
            (row,) = forced_log_probs(model, source, [tokens])
            tokens.append(max((token for token in range(VOCAB) if token not in BANNED), key=row.__getitem__))
            total += row[tokens[-1]]
        finished = tokens[-1] == EOS_ID
        ids = tuple(tokens[:-1] if finished else tokens)
        assert_same([hypothesis], [Hypothesis(ids, total, total, finished)], 1e-4)


def test_banned_ids_are_never_generated_and_keep_their_share():
    # PAD, UNK and BOS are the most probable at every step
    def table(sentence, prefix):
        return [3.0, 3.0, 3.0, *random_table(6, 3)(sentence, prefix)]

    found = beam_search(TableModel(table, 8), sources(*range(4, 12)), n_best=4)
    greedy = greedy_search(TableModel(table, 8), sources(*range(4, 12)))
    for sentence, hypotheses in enumerate([*found, *([h] for h in greedy)]):
        for h in hypotheses:
            assert not BANNED & set(h.ids)
            tokens = [*h.ids, *[EOS_ID] * h.finished]
            total = sum(
                log_prob_of(table, 4 + sentence % 8, (BOS_ID, *tokens[:i]), token) for i, token in enumerate(tokens)
            )
            assert h.log_prob == pytest.approx(total, abs=1e-5)


def test_a_source_of_nothing_but_padding_has_an_output_too():
    model = transformer(0)
    inputs = random_sources(1, [5])
    together = beam_search(model, pad([*inputs, []]))
    assert_same(together[0], beam_search(model, pad(inputs))[0])
    (hypothesis,) = together[1]
    assert math.isfinite(hypothesis.score)


def test_no_sources_give_no_outputs():
    model = transformer(0)
    empty = torch.empty((0, 3), dtype=torch.long)
    assert search_all(model, []) == []
    assert beam_search(model, empty) == []
    assert greedy_search(model, empty) == []


def test_decoding_past_a_learned_table_is_cut_there():
    model = transformer(0, position="learned", max_positions=16)
    model.late = 1000
    inputs = random_sources(0, [16, 3])
    for hypotheses in search_all(model, inputs):
        assert len(hypotheses[0].ids) == 16
        assert not hypotheses[0].finished


# Any batch, any order


def results_equal(found, expected):
    assert len(found) == len(expected)
    for hypotheses, others in zip(found, expected, strict=True):
        assert_same(hypotheses, others, 1e-4)


@pytest.mark.parametrize("seed", range(2))
def test_neither_batches_nor_order_nor_company_change_the_outputs(seed):
    model = transformer(seed)
    inputs = random_sources(seed, [7, 2, 25, 1, 12, 7, 3, 9])
    alone = [beam_search(model, torch.tensor([source]), n_best=2)[0] for source in inputs]
    assert len({hypotheses[0].ids for hypotheses in alone}) > 4
    for batch_tokens in (1, 60, 100_000):
        results_equal(search_all(model, inputs, n_best=2, batch_tokens=batch_tokens), alone)
    order = random.Random(seed).sample(range(len(inputs)), len(inputs))
    shuffled = search_all(model, [inputs[i] for i in order], n_best=2, batch_tokens=200)
    results_equal(shuffled, [alone[i] for i in order])


def test_greedy_search_does_not_depend_on_company():
    model = transformer(1)
    inputs = random_sources(1, [7, 2, 25, 1, 12])
    together = greedy_search(model, pad(inputs))
    assert_same(together, [greedy_search(model, torch.tensor([source]))[0] for source in inputs], 1e-4)


@pytest.mark.parametrize(
    ("batch_tokens", "shapes"),
    [
        (1, [(1, 6), (1, 3), (1, 2), (1, 2)]),  # longer than the budget: a batch of its own
        (24, [(2, 6), (3, 2)]),  # 24 / (6 * 2) = 2 rows, then 24 / (2 * 2) = 6 rows
        (1000, [(5, 6)]),
    ],
)
def test_batches_hold_their_budget_of_padded_tokens_times_beams(batch_tokens, shapes):
    model = transformer(0)
    lengths = [2, 6, 2, 3] if batch_tokens == 1 else [2, 6, 2, 2, 3]
    seen = []
    start = model.start
    model.start = lambda src: seen.append(tuple(src.shape)) or start(src)
    search_all(model, random_sources(0, lengths), beam_size=2, batch_tokens=batch_tokens)
    assert seen == shapes


def test_pad_stands_on_the_right():
    assert pad([[5, 6, 3], [3], []]).tolist() == [[5, 6, 3], [3, PAD_ID, PAD_ID], [PAD_ID] * 3]


# Modes and errors


@pytest.mark.parametrize("training", [True, False])
def test_search_all_uses_no_dropout_and_restores_the_mode(training):
    dropping, plain = transformer(2, dropout=0.5), transformer(2)
    inputs = random_sources(2, [5, 3, 8])
    dropping.train(training)
    results_equal(search_all(dropping, inputs), search_all(plain, inputs))
    assert all(module.training == training for module in dropping.modules())


def test_the_mode_is_restored_after_an_error_too():
    model = transformer(2, position="learned", max_positions=8).train()
    with pytest.raises(ValueError, match="max_positions"):
        search_all(model, random_sources(2, [9]))
    assert model.training


def test_search_keeps_no_graph():
    model = transformer(0)
    tracked = []
    step = model.step
    model.step = lambda tokens, state: tracked.append(step(tokens, state).requires_grad) or step(tokens, state)
    for search in (beam_search, greedy_search):
        search(model, pad(random_sources(0, [4])))
    assert tracked
    assert not any(tracked)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"n_best": 5}, ["n_best = 5", "beam_size = 4"]),
        ({"n_best": 0}, ["n_best = 0"]),
        ({"n_best": 3, "beam_size": 2}, ["n_best = 3", "beam_size = 2"]),
        ({"beam_size": 0}, ["beam_size = 0"]),
        ({"length_penalty": -0.1}, ["length_penalty = -0.1"]),
    ],
)
@pytest.mark.parametrize("through_search_all", [True, False])
def test_sizes_out_of_range_are_named(given, words, through_search_all):
    model = transformer(0)
    with pytest.raises(ValueError, match=words[0]) as error:
        search_all(model, [[4, EOS_ID]], **given) if through_search_all else beam_search(model, sources(4), **given)
    for word in words:
        assert word in str(error.value)
