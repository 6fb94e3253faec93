"""Continual learning with unlearning of tasks on request, as a plugin package for Avalanche.

A network learns tasks one after another, and any learned task can be unlearned at any moment::

    import torch
    from avalanche_amnesia import MLP, AmnesiacHAT, MaskedModel, SplitDigits

    stream = SplitDigits(n_tasks=5)
    model = MaskedModel(MLP(64, hidden=(64,), features=32))
    strategy = AmnesiacHAT(model=model, optimizer=torch.optim.Adam(model.parameters()), train_mb_size=32)
    strategy.train(stream.train_stream)
    print(strategy.unlearn([2]))  # the changes, and whether the result is exact
    print(strategy.model.tasks)  # (0, 1, 3, 4)

With :class:`DisjointSubnets` over a :class:`DisjointModel` the result is exact, bit for bit, for any network. More
names are in the subpackages ``training``, ``models``, ``evaluation``, ``benchmarks``, ``isolation``, ``logging``,
``audit``, ``contrib`` and ``lab``.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.2.0"
