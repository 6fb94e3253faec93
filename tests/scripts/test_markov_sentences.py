"""Sentences of Markov chains: labels, grammar, seeds and difficulty."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from support.strategy_state import same

from experiments.sentences import GROUPS, PADDING, MarkovSentences, _grammar


def pairs(benchmark):
    return [e.tensors for stream in (benchmark.train_stream, benchmark.test_stream) for e in stream]


def test_sentences_have_the_right_shapes_and_balanced_labels():
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


def test_padding_only_follows_the_words():
    for length in (4, 11, 24):
        for x, _ in pairs(MarkovSentences(n_train=300, length=length)):
            words = x != PADDING
            ends = words.sum(1)
            assert torch.equal(words, torch.arange(length) < ends[:, None])
            assert ends.min() == (length + 1) // 2
            assert ends.max() == length


def test_sentences_depend_on_seed_and_task_alone():
    first = MarkovSentences(seed=1, n_train=40, n_test=20)
    torch.manual_seed(77)
    state = torch.get_rng_state()
    again, other = MarkovSentences(seed=1, n_train=40, n_test=20), MarkovSentences(seed=2, n_train=40, n_test=20)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(pairs(first), pairs(again))
    assert not any(torch.equal(a[0], b[0]) for a, b in zip(pairs(first), pairs(other), strict=True))
    short, long = MarkovSentences(2, n_train=40), MarkovSentences(5, n_train=40)
    for name in ("train", "test"):
        assert same(*([e.tensors for e in benchmark.streams[name]][:2] for benchmark in (short, long)))


def test_training_and_test_sentences_differ():
    benchmark = MarkovSentences(1, n_train=128, n_test=128)
    train, test = (benchmark.streams[name][0].tensors[0] for name in ("train", "test"))
    assert not torch.equal(train, test)
    assert len(torch.cat([train, test]).unique(dim=0)) > 250


def test_sentences_follow_the_grammar_of_their_class():
    for task, experience in enumerate(MarkovSentences(seed=1, n_classes=6).train_stream):
        words, following = _grammar(1, task, 6, 64)
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


def test_classes_differ_only_in_the_order_of_words():
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


REFUSED = [
    ({"n_tasks": 0}, "n_tasks must be an int of at least 1"),
    ({"n_classes": 7}, "n_classes must be an int from 1 to 6, got 7"),
    ({"n_train": 1}, "n_train must be an int of at least 2"),
    ({"n_test": 2.0}, "n_test must be an int of at least 2"),
    ({"length": 3}, "length must be an int of at least 4"),
    ({"vocabulary": 12}, "vocabulary must be an int of at least 13"),
    ({"seed": "a"}, "seed"),
]


def test_wrong_arguments_are_refused():
    for arguments, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            MarkovSentences(**arguments)
