"""Savings of a subnet: parameters and floating-point operations beside those of the masked network."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from avalanche_amnesia.contrib.export.dense import extract, masked_model
from avalanche_amnesia.models.modes import evaluating
from avalanche_amnesia.models.task_masked import TaskMaskedModel
from avalanche_amnesia.text_table import text_table


@dataclass(frozen=True)
class SubnetReport:
    """Cost of one task's forward, masked and extracted; printed, it is a table.

    Attributes:
        task: its label.
        input_shape: of the one input that FLOPs are counted on, without the batch.
        masked_parameters: of the masked network: the whole backbone, the task's own norms and its head.
        subnet_parameters: of the subnet, head included.
        masked_flops: of the masked network with all of its units computed, for one input: products and sums of
            convolutions, matrix products and attention (``torch.utils.flop_counter``).
        subnet_flops: of the subnet.
    """

    task: int
    input_shape: tuple[int, ...]
    masked_parameters: int
    subnet_parameters: int
    masked_flops: int
    subnet_flops: int

    @property
    def parameter_share(self) -> float:
        """Parameters of the subnet by those of the masked network."""
        return self.subnet_parameters / self.masked_parameters

    @property
    def flop_share(self) -> float:
        """FLOPs of the subnet by those of the masked network; 1 where neither has any."""
        return self.subnet_flops / self.masked_flops if self.masked_flops else 1.0

    def __str__(self) -> str:
        counts = (
            ("parameters", self.masked_parameters, self.subnet_parameters, self.parameter_share),
            (f"FLOPs, input {self.input_shape}", self.masked_flops, self.subnet_flops, self.flop_share),
        )
        rows = [(name, f"{masked:,}", f"{subnet:,}", f"{share:.1%}") for name, masked, subnet, share in counts]
        return text_table((f"task {self.task}", "masked", "subnet", "share"), rows)


def subnet_report(model: TaskMaskedModel, task: int) -> SubnetReport:
    """Extract a task's subnet and count what it needs.

    Args:
        model: any :class:`MaskedModel`; not changed.
        task: a task with a head and a kept mask.

    Raises:
        ModelError: as :func:`extract`.
        UnknownTaskError: as :func:`extract`.
        ValueError: as :func:`extract`.
    """
    model = masked_model(model, task)
    subnet = extract(model, task)
    backbone, head, parts = model.backbone, model.head(task), model.parts_of(task)
    shared = model.graph.owned  # what the task has a copy of
    masked = {id(p): p for name, p in backbone.named_parameters() if name not in shared}
    masked |= {id(p): p for p in (*parts.parameters(), *head.parameters())}
    x = model.graph.inputs.batch(1, like=next(iter(model.parameters())))
    mask = model.binary_mask(task)
    with evaluating(model):
        return SubnetReport(
            task=task,
            input_shape=model.graph.input_shape,
            masked_parameters=sum(p.numel() for p in masked.values()),
            subnet_parameters=sum(p.numel() for p in subnet.parameters()),
            masked_flops=_flops(lambda: head(backbone(x, parts, model.by_layer(mask.float())))),
            subnet_flops=_flops(lambda: subnet(*model.graph.inputs.tensors(x))),
        )


def _flops(run: Callable[[], Tensor]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()
