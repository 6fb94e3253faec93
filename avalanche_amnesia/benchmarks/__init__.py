"""Streams of tasks, and the unlearning requests that they carry."""

from avalanche_amnesia.benchmarks.digits import PermutedDigits, RotatedDigits, SplitDigits
from avalanche_amnesia.benchmarks.idx import CorruptDataError, DataNotFoundError
from avalanche_amnesia.benchmarks.mnist import PermutedMNIST, RotatedMNIST, SplitFashionMNIST, SplitMNIST
from avalanche_amnesia.benchmarks.requests import UnlearningRequest, with_unlearning
from avalanche_amnesia.benchmarks.sentences import MarkovSentences
from avalanche_amnesia.benchmarks.tasks import TaskExperience, task_benchmark
from avalanche_amnesia.unlearning.ledger import RequestError

__all__ = [
    "CorruptDataError",
    "DataNotFoundError",
    "MarkovSentences",
    "PermutedDigits",
    "PermutedMNIST",
    "RequestError",
    "RotatedDigits",
    "RotatedMNIST",
    "SplitDigits",
    "SplitFashionMNIST",
    "SplitMNIST",
    "TaskExperience",
    "UnlearningRequest",
    "task_benchmark",
    "with_unlearning",
]
