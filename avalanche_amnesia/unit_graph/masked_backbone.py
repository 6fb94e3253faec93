"""The masked backbone: the user's modules, run by a graph that masks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from avalanche_amnesia.unit_graph.backbones import check_backbone
from avalanche_amnesia.unit_graph.graph import UnitGraph
from avalanche_amnesia.unit_graph.program import Program
from avalanche_amnesia.unit_graph.tracing import Trace, trace, without
from avalanche_amnesia.unit_graph.trial import compare, try_out


class MaskedBackbone(nn.Module):
    """A backbone with masks, under its own module and parameter names.

    Args:
        backbone: its modules, parameters and buffers are used as they are.
        found: what is known of it.

    Attributes:
        tried: whether it was tried out that masks protect.
    """

    def __init__(self, backbone: nn.Module, found: Trace) -> None:
        super().__init__()
        self._modules = dict(backbone._modules)
        self._parameters = dict(backbone._parameters)
        self._buffers = dict(backbone._buffers)
        self._non_persistent_buffers_set = set(backbone._non_persistent_buffers_set)
        self.training = backbone.training
        self.original = type(backbone).__name__
        if found.classifier is not None:
            self._replace(found.classifier)
        device = next(backbone.parameters()).device
        for name, constant in found.constants.items():
            self.register_buffer(name, constant.to(device, copy=True), persistent=False)
        self.owned, self.inputs, self._programs = dict(found.owned), found.graph.inputs, found.programs
        self._frozen, self.tried = found.frozen_modules, found.tried
        self._compile()
        self._settle_frozen()  # the modes of all others are the user's

    def _replace(self, classifier: str) -> None:
        """Leave a module out, without touching the user's own object."""
        owner: nn.Module = self
        *path, last = classifier.split(".")
        for part in path:
            twin = _shallow(owner.get_submodule(part))
            owner._modules[part] = twin
            owner = twin
        owner._modules[last] = nn.Identity()

    def _compile(self) -> None:
        self._forwards = {mode: program.compiled(self.owned) for mode, program in self._programs.items()}

    def forward(self, x: Any, own: Mapping[str, nn.Module], masks: Mapping[str, Tensor]) -> Tensor:
        """Features ``(batch, features)``.

        Args:
            x: ``(batch, …)``; or what the backbone takes in its place.
            own: the task's own modules, by name.
            masks: layer name → ``(units,)``.
        """
        tensors = self.inputs.tensors(x)
        self._programs[self.training].sizes.check(tensors)
        result: Tensor = self._forwards[self.training](self, *tensors, own, masks)
        return result

    def train(self, mode: bool = True) -> MaskedBackbone:
        """As usual; modules declared frozen stay in evaluation mode: running statistics would move with every task."""
        super().train(mode)
        self._settle_frozen()
        return self

    def _settle_frozen(self) -> None:
        for name in self._frozen:
            self.get_submodule(name).eval()

    def program(self, training: bool = False) -> Program:
        """The graph of one mode, with what is known of its values."""
        return self._programs[training]

    def code(self, training: bool = False) -> str:
        """The forward's source, for people."""
        return self._programs[training].source

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_forwards"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._compile()


def _shallow(module: nn.Module) -> nn.Module:
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__ = dict(module.__dict__)
    twin._modules = dict(module._modules)
    return twin


def trace_backbone(
    backbone: nn.Module, input_shape: tuple[int, ...] | None = None, *, trial: bool = True, **options: Any
) -> tuple[MaskedBackbone, UnitGraph]:
    """Put a mask behind every weighted layer of a feature extractor.

    Args:
        backbone: any module that torch.export takes.
        input_shape: shape of one input without the batch; found by trying where it does not matter.
        trial: whether to try out that masks protect, see :func:`~avalanche_amnesia.unit_graph.trial.try_out`.
        options: ``example``, ``classifier``, ``norm``, ``frozen``, ``task_owned``, as of
            :func:`~avalanche_amnesia.unit_graph.tracing.examine`.

    Returns:
        The rewritten backbone, called as ``module(x, own, {layer name: mask})``, with the same parameter names and
        the same parameter objects; and its :class:`UnitGraph`.

    Raises:
        ModelError: for anything that can't be masked. Nothing is masked half.
        ValueError: for a norm or a name that is not known.
    """
    check_backbone(backbone)
    found = trace(backbone, input_shape, **options)
    masked = MaskedBackbone(backbone, found)
    if trial:
        # Also where the trace is known: forward may read globals.
        if options.get("norm", "task") == "task":
            with without(backbone, found.classifier):
                compare(backbone, masked, found.graph, found.owned)
        if not found.tried:
            try_out(masked, found.graph, found.owned, found.programs)
        found.tried = masked.tried = True
    return masked, found.graph
