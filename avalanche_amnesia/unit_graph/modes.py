"""Evaluation mode of a backbone, from its graph in training mode: an export takes long, and most differ in a few flags.

That holds where nothing but norms, dropout and attention of torch.nn ask a module for its mode. Who asks is seen while
the forward runs; wherever something else does, where the forward's path is drawn at random, or a graph looks unlike
what these modules leave, both modes are read.
"""

from __future__ import annotations

import pickle
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from avalanche_amnesia.unit_graph.functional import ATEN

_KNOWN_READERS = {
    code.__code__
    for code in (
        *(_BatchNorm.forward, _InstanceNorm._apply_instance_norm),
        *(nn.Dropout.forward, nn.MultiheadAttention.forward),
    )
}
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_PLACE_OF_FLAG = {ATEN.batch_norm.default: 5, ATEN.instance_norm.default: 5, ATEN.dropout.default: 2}


class WatchedModes:
    """Watch over what may lead a forward along another path in the other mode.

    Args:
        backbone: any module.
    """

    def __init__(self, backbone: nn.Module) -> None:
        # By their dictionaries: while it traces, torch.export puts proxies into the places of modules.
        self._modules = {id(vars(module)) for module in backbone.modules()}
        self._watched = self._may_part = False

    @property
    def one_path(self) -> bool:
        """Whether nothing but the known modules' own code has asked for a mode, and nothing has set one.

        Numbers that were drawn from Python or numpy count too: the path may depend on them.
        """
        return self._watched and not self._may_part

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See every look at ``training`` for the length of a block: there it is a property of all modules."""
        before, self._watched = _draws(), True
        nn.Module.training = property(self._read, self._write)  # type: ignore[assignment]
        try:
            yield
        finally:
            del nn.Module.training
        self._may_part |= _draws() != before

    def _read(self, module: nn.Module) -> bool:
        held = vars(module)
        if id(held) in self._modules and sys._getframe(1).f_code not in _KNOWN_READERS:
            self._may_part = True
        mode: Any = held["training"] if "training" in held else module.__getattr__("training")  # of scripted modules
        return bool(mode)

    def _write(self, module: nn.Module, mode: bool) -> None:
        self._may_part |= id(vars(module)) in self._modules
        vars(module)["training"] = mode


def _draws() -> bytes:
    """Where the global streams of Python and numpy are."""
    return pickle.dumps((random.getstate(), np.random.get_state(legacy=False)))  # noqa: NPY002


def in_evaluation(graph: fx.Graph, backbone: nn.Module, *, wrote_over_views: bool) -> fx.Graph | None:
    """The graph of a backbone in evaluation mode.

    Args:
        graph: of training mode, not changed; each node has the path of its module.
        backbone: whose forward has one path, see :class:`WatchedModes`.
        wrote_over_views: whether the forward wrote over values that others may read. Behind dropout they are others
            in evaluation mode: it then returns what it was given, and no copy.

    Returns:
        None where the one can't be told from the other: a module has hooks, or does something that is not known.
    """
    modules = dict(backbone.named_modules(remove_duplicate=False))
    if not all(_is_understood(module) for module in modules.values()):
        return None
    found, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    found.output(found.graph_copy(graph, copies))
    for node in list(found.nodes):
        if node.op != "call_function":
            continue
        module = modules.get(_path_of(node))
        flag = _PLACE_OF_FLAG.get(node.target)
        if isinstance(module, (*_BATCH_NORMS, *_INSTANCE_NORMS, nn.Dropout)):
            if node.target is ATEN.sym_size.int:
                continue
            if node.target is not _operation(module):
                return None
            if isinstance(module, nn.Dropout):
                if wrote_over_views:
                    return None
                node.replace_all_uses_with(node.args[0])
                found.erase_node(node)
            else:
                node.update_arg(flag, _reads_its_input(module))
        elif flag is not None and node.args[flag]:
            return None  # it may be of a known module, under a path that is not known
    return found


def _is_understood(module: nn.Module) -> bool:
    """Tell whether a module's mode decides nothing but a flag of its one operation."""
    kind = type(module)
    if not isinstance(module, (_BatchNorm, _InstanceNorm, nn.Dropout, nn.MultiheadAttention)):
        return True  # nobody asked for its mode
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return False
    if kind in _BATCH_NORMS:
        return bool(module.track_running_stats) or (module.running_mean is None and module.running_var is None)
    if kind is nn.MultiheadAttention:
        return bool(module.dropout == 0)
    return kind in _INSTANCE_NORMS or kind is nn.Dropout


def _operation(module: nn.Module) -> Any:
    if isinstance(module, nn.Dropout):
        return ATEN.dropout.default
    return ATEN.batch_norm.default if isinstance(module, _BATCH_NORMS) else ATEN.instance_norm.default


def _reads_its_input(norm: _BatchNorm | _InstanceNorm) -> bool:
    """Tell whether a norm takes its statistics from its input even in evaluation mode."""
    if isinstance(norm, _INSTANCE_NORMS):
        return not norm.track_running_stats
    return norm.running_mean is None and norm.running_var is None


def _path_of(node: fx.Node) -> str:
    """Path of a node's module; torch.export numbers the calls of a module that runs more than once."""
    paths = [str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return re.sub(r"@\d+", "", paths[-1] if paths else "").removeprefix("backbone").removeprefix(".")
