"""Sentences of Markov chains: labels, grammar, seeds and difficulty."""

import pytest
import torch
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
            words = x != PADDING
            assert torch.equal(words, torch.arange(12) < words.sum(1, keepdim=True))  # padding only after the words
            assert words.sum(1).min() == 6
    assert len(torch.cat([x for x, _ in pairs(benchmark)]).unique(dim=0)) > 200  # also between training and test


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
