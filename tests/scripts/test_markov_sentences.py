from itertools import pairwise

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from support.strategy_state import same

from avalanche_amnesia.benchmarks import with_unlearning
from experiments.sentences import GROUPS, PADDING, WORDS, MarkovSentences, _grammar


def pairs(benchmark):
    return [e.tensors for stream in (benchmark.train_stream, benchmark.test_stream) for e in stream]


def test_shapes_and_labels():
    benchmark = MarkovSentences(n_classes=3, n_train=50, n_test=20, length=12)
    assert [e.original_classes for e in benchmark.train_stream] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    for n, stream in ((50, benchmark.train_stream), (20, benchmark.test_stream)):
        for experience in stream:
            x, y = experience.tensors
            assert x.shape == (n, 12)
            assert x.dtype == y.dtype == experience.dataset[0][0].dtype == torch.int64
            counts = y.bincount(minlength=3)
            assert counts.sum() == n
            assert counts.max() - counts.min() <= 1


def test_padding_stands_behind_the_words_alone():
    for length in (4, 11, 24):
        for x, _ in pairs(MarkovSentences(n_train=300, length=length)):
            words = x != PADDING
            ends = words.sum(1)
            assert torch.equal(words, torch.arange(length) < ends[:, None])
            assert ends.min() == (length + 1) // 2
            assert ends.max() == length


def test_the_seed_alone_decides():
    first = MarkovSentences(seed=1, n_train=40, n_test=20)
    torch.manual_seed(77)
    state = torch.get_rng_state()
    again, other = MarkovSentences(seed=1, n_train=40, n_test=20), MarkovSentences(seed=2, n_train=40, n_test=20)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(pairs(first), pairs(again))
    assert not any(torch.equal(a[0], b[0]) for a, b in zip(pairs(first), pairs(other), strict=True))


def test_a_task_does_not_depend_on_the_others():
    short, long = MarkovSentences(2, n_train=40), MarkovSentences(5, n_train=40)
    for name in ("train", "test"):
        parts = [[e.tensors for e in benchmark.streams[name]][:2] for benchmark in (short, long)]
        assert same(*parts)


def test_training_and_test_sentences_are_other_ones():
    benchmark = MarkovSentences(1, n_train=128, n_test=128)
    train, test = (benchmark.streams[name][0].tensors[0] for name in ("train", "test"))
    assert not torch.equal(train, test)
    assert len(torch.cat([train, test]).unique(dim=0)) > 250


def test_neighbours_share_half_of_their_words():
    words = [set(e.tensors[0].unique().tolist()) - {PADDING} for e in MarkovSentences(8).train_stream]
    assert [len(of) for of in words] == [WORDS] * 8
    assert [len(one & other) for one, other in pairwise(words)] == [WORDS // 2] * 7
    assert not words[0] & words[2]
    assert set().union(*words) <= set(range(1, 64))


def test_words_come_back_in_a_small_vocabulary():
    for x, _ in pairs(MarkovSentences(4, n_train=300, vocabulary=WORDS + 1)):
        assert x.unique().tolist() == list(range(WORDS + 1))


@pytest.mark.parametrize("seed", range(3))
def test_sentences_follow_the_grammar_of_their_class(seed):
    for task, experience in enumerate(MarkovSentences(seed=seed, n_classes=6).train_stream):
        words, following = _grammar(seed, task, 6, 64)
        group = torch.full((64,), -1)
        for number, of in enumerate(words):
            group[of] = number
        assert len({tuple(row) for row in following.tolist()}) == 6
        x, y = experience.tensors
        assert (group[x[:, 0]] == 0).all()
        both = x[:, 1:] != PADDING
        expected = following[y[:, None], group[x[:, :-1]]]
        share = (expected == group[x[:, 1:]])[both].double().mean()
        assert abs(share - (0.95 + 0.05 / GROUPS)) < 0.01


def test_words_must_be_ordered_to_be_told_apart():
    benchmark = MarkovSentences(n_train=1000, n_test=500)
    for train, test in zip(benchmark.train_stream, benchmark.test_stream, strict=True):
        (x, y), (unseen, labels) = train.tensors, test.tensors
        found = []
        for order in (1, 2):  # words; pairs of words
            ids = [of if order == 1 else of[:, :-1] * 64 + of[:, 1:] for of in (x, unseen)]
            features = [torch.zeros(len(of), 64**order).scatter_add_(1, of, torch.ones(of.shape)) for of in ids]
            model = LogisticRegression(max_iter=300).fit(features[0], y)
            found.append(model.score(features[1], labels))
        assert found[0] < 0.8
        assert found[1] > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("task", range(3))
def test_a_small_network_learns_each_task(task):
    benchmark = MarkovSentences()
    (x, y), (unseen, labels) = (benchmark.streams[name][task].tensors for name in ("train", "test"))
    network = Attentive()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(12):
        for part in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(x[part]), y[part]).backward()
            optimizer.step()
    with torch.no_grad():
        assert (network(unseen).argmax(1) == labels).double().mean() > 0.9


class Attentive(torch.nn.Module):
    """A BERT of two small layers, in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(64, 32)
        self.places = torch.nn.Parameter(torch.randn(20, 32) * 0.02)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(32, 2)

    def forward(self, tokens):
        hidden = self.encoder(self.words(tokens) + self.places, src_key_padding_mask=tokens == PADDING)
        return self.head(hidden[:, 0])


def test_requests_go_with_the_stream():
    benchmark = with_unlearning(MarkovSentences(n_train=8, n_test=4), requests={2: [0]})
    assert len(benchmark.train_stream) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_tasks": 0}, "n_tasks must be an int of at least 1"),
        ({"n_classes": 7}, "n_classes must be an int from 1 to 6, got 7"),
        ({"n_classes": 0}, "n_classes must be an int of at least 1"),
        ({"n_train": 1}, "n_train must be an int of at least 2"),
        ({"n_test": 2.0}, "n_test must be an int of at least 2"),
        ({"length": 3}, "length must be an int of at least 4"),
        ({"vocabulary": 12}, "vocabulary must be an int of at least 13"),
        ({"seed": "a"}, "seed"),
    ],
)
def test_values_that_are_not_allowed(arguments, message):
    with pytest.raises(ValueError, match=message):
        MarkovSentences(**arguments)
