"""Run HAT, AdaHAT or AmnesiacHAT on permuted MNIST: ten tasks of 3,000 images, MLP 784-400-400 with dropout .2/.5.

A small version of an experiment in HAT's paper: batch 64, 20 epochs; for HAT, λ .75 and s_max 400.

python experiments/permuted_mnist.py --root DATA --method hat --optimizer sgd
"""

import argparse

import torch
from torch.optim import SGD, Adam

from avalanche_amnesia.contrib.streams import PermutedMNIST
from avalanche_amnesia.evaluation.functional import accuracy
from avalanche_amnesia.models import MLP, MaskedModel
from avalanche_amnesia.training import HAT, AdaHAT, AmnesiacHAT

METHODS = {"hat": HAT, "adahat": AdaHAT, "amnesiac_hat": AmnesiacHAT}


@torch.no_grad()
def test(model, experiences):
    model.eval()
    tensors = [(experience.task_label, *experience.tensors) for experience in experiences]
    return [accuracy(model(x, task), y) for task, x, y in tensors]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", default=None, help="data root (or the variable AMNESIA_DATA)")
    parser.add_argument("--method", choices=METHODS, default="hat")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    benchmark = PermutedMNIST(10, root=options.root, n_train=3000, n_test=1000, seed=options.seed)
    torch.manual_seed(options.seed)
    model = MaskedModel(MLP(784, hidden=(400,), features=400, dropout=(0.2, 0.5)))
    parameters = model.parameters()
    optimizer = SGD(parameters, lr=0.05) if options.optimizer == "sgd" else Adam(parameters, lr=1e-3, fused=True)
    strategy = METHODS[options.method](
        model=model, optimizer=optimizer, train_mb_size=64, train_epochs=20, seed=options.seed
    )
    learned = []
    for experience in benchmark.train_stream:
        strategy.train(experience)
        now = test(model, benchmark.test_stream[: experience.task_label + 1])
        learned.append(now[-1])
        print(f"after task {experience.task_label}: " + " ".join(f"{value:.3f}" for value in now), flush=True)
    forgetting = max(then - value for then, value in zip(learned, now, strict=True))
    print(f"average accuracy {sum(now) / len(now):.4f}, largest forgetting {forgetting:.4f}")


if __name__ == "__main__":
    main()
