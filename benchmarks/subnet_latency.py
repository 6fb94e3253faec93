"""Time that a task's dense subnet takes, as a ratio to the masked model and to the plain backbone without masks.

    python -m benchmarks.subnet_latency [--network NAME …] [--batch B …] [--share S] [--rounds N] [--channels-last]

One task with a random mask, evaluation mode, CPU time of one thread. In every round the plain network, the masked model
and the subnet run one after the other, so that whatever else the machine does meets all three; a figure is the median
over the rounds of the ratio within a round. Beside them stand the shares of FLOPs and parameters: the goal is a time in
proportion to the FLOPs that are left.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
import torchvision
from avalanche.models import SlimResNet18
from torch import Tensor, nn

from avalanche_amnesia.contrib.export import extract, subnet_report
from avalanche_amnesia.models import MLP, MaskedModel

N_CLASSES = 10
TASK = 0


def small_image_resnet18() -> nn.Module:
    """torchvision's ResNet-18 with the usual stem for 32×32 images."""
    net = torchvision.models.resnet18(num_classes=N_CLASSES)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    return net


class Network(NamedTuple):
    """A network to be timed: how to make it with a classifier, and how to mask what is in front of that."""

    make: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    classifier: str


def mlp() -> nn.Module:
    return nn.Sequential(MLP(784, hidden=(1024, 1024), features=1024), nn.Linear(1024, N_CLASSES))


NETWORKS = {
    "resnet18": Network(small_image_resnet18, (3, 32, 32), "fc"),
    "slimresnet18": Network(lambda: SlimResNet18(N_CLASSES), (3, 32, 32), "linear"),
    "mlp": Network(mlp, (784,), "1"),
}


def masked_model(network: Network, share: float) -> MaskedModel:
    """A model with one task whose mask opens about this share of the units, at random."""
    torch.manual_seed(0)
    model = MaskedModel(network.make(), input_shape=network.input_shape, classifier=network.classifier)
    model.add_head(TASK, N_CLASSES)
    model.start_task(TASK, share - torch.rand(model.n_units, generator=torch.Generator().manual_seed(0)))
    model.finish_task()
    return model.eval()


@torch.no_grad()
def seconds(
    contestants: Mapping[str, Callable[[Tensor], Any]], x: Tensor, rounds: int, calls: int
) -> dict[str, list[float]]:
    """Seconds of one forward, contestant → one figure per round; they take turns."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run(x)
    for _ in range(rounds):
        for name, run in contestants.items():
            began = time.thread_time()
            for _ in range(calls):
                run(x)
            found[name].append((time.thread_time() - began) / calls)
    return found


def ratio(of: list[float], to: list[float]) -> str:
    """Median and quartiles of the ratios within the rounds."""
    ordered = sorted(a / b for a, b in zip(of, to, strict=True))
    low, high = ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]
    return f"{median(ordered):.2f} ({low:.2f} to {high:.2f})"


def measure(name: str, batch: int, share: float, rounds: int, calls: int, memory_format: torch.memory_format) -> str:
    """One line of the table."""
    network = NETWORKS[name]
    model = masked_model(network, share)
    report, subnet = subnet_report(model, TASK), extract(model, TASK)
    x = torch.randn(batch, *network.input_shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(subnet(x), model(x, TASK), atol=1e-5)
    plain = network.make().eval()
    if x.dim() == 4:
        x = x.to(memory_format=memory_format)
        for module in (plain, model, subnet):
            module.to(memory_format=memory_format)
    contestants: dict[str, Callable[[Tensor], Any]] = {
        "plain": plain,
        "masked": lambda x: model(x, TASK),
        "subnet": subnet,
    }
    found = seconds(contestants, x, rounds, calls)
    return (
        f"{name:14}{batch:<7}{report.parameter_share:<12.3f}{report.flop_share:<8.3f}"
        f"{ratio(found['subnet'], found['masked']):24}{ratio(found['subnet'], found['plain']):24}"
        f"{ratio(found['masked'], found['plain']):24}{median(found['plain']) * 1e3:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--batch", nargs="+", type=int, default=[16, 1])
    parser.add_argument("--share", type=float, default=0.5, help="of units that the mask opens")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--calls", type=int, default=3, help="forwards per contestant and round")
    parser.add_argument(
        "--channels-last", action="store_true", help="memory format of weights and images, of all three"
    )
    options = parser.parse_args()
    memory_format = torch.channels_last if options.channels_last else torch.contiguous_format
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"a share of {options.share} of the units, 1 thread, {options.rounds} rounds: median ratio (and quartiles)")
    heads = ("network", "batch", "parameters", "FLOPs", "subnet/masked", "subnet/plain", "masked/plain", "plain ms")
    print("".join(f"{head:<{width}}" for head, width in zip(heads, (14, 7, 12, 8, 24, 24, 24, 0), strict=True)))
    for name in options.network:
        for batch in options.batch:
            print(measure(name, batch, options.share, options.rounds, options.calls, memory_format), flush=True)


if __name__ == "__main__":
    main()
