"""Which nodes of a backbone's graph write into the memory of their arguments, and which of them may."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from avalanche_amnesia.models.findings import Refused
from avalanche_amnesia.models.registry import MAY_RETURN_ITSELF
from avalanche_amnesia.models.values import ParameterValue

# The operators and, called by hand, the methods behind them.
_IN_PLACE = frozenset(
    form
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
    for form in (f"i{name}", f"__i{name}__")
) | {"setitem", "__setitem__"}


class InPlace:
    """Operations that write in place.

    Args:
        modules: of the backbone, by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules

    def writes(self, node: fx.Node) -> bool:
        """Whether a node changes its first argument."""
        if node.op == "call_module":
            return bool(getattr(self._modules.get(str(node.target)), "inplace", False))
        name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
        declared = bool(node.kwargs.get("inplace", False))
        return declared or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))

    def check(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> None:
        """Refuse to write into a value that is read elsewhere too: there it would change behind its mask.

        Args:
            node: that may write into its first argument.
            values: what is known of the nodes in front of it.

        Raises:
            Refused: if it does, with the mend.
        """
        if node.kwargs.get("out") is not None:
            raise Refused("it writes its result into another tensor (out=…)", "use what it returns")
        if not self.writes(node):
            return
        written = node.args[0] if node.args else None
        if not isinstance(written, fx.Node):
            return
        if isinstance(values.get(written), (ParameterValue, Tensor)) and written.op == "get_attr":
            raise Refused("it writes in place into a parameter or buffer", "keep what changes in a layer of torch.nn")
        if any(
            user is not node and not (user < node) for alias in self._aliases(written, node) for user in alias.users
        ):
            raise Refused(
                "it writes in place into a value that is read elsewhere too", "use its result (or fix(model))"
            )

    def _aliases(self, written: fx.Node, writer: fx.Node) -> list[fx.Node]:
        """Nodes in front of a writer whose results may lie in the memory that it writes to."""
        root = written
        while self._may_return_itself(root) and root.args and isinstance(root.args[0], fx.Node):
            root = root.args[0]
        found = [root]
        for node in found:
            found += [user for user in node.users if user < writer and self._may_return_itself(user)]
        return found

    def _may_return_itself(self, node: fx.Node) -> bool:
        target: Any = node.target
        if node.op == "call_module":
            kind = type(self._modules.get(str(node.target)))
            return self.writes(node) or kind in MAY_RETURN_ITSELF or kind.__name__ in MAY_RETURN_ITSELF
        return self.writes(node) or target in MAY_RETURN_ITSELF
