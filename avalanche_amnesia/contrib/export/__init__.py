"""A task's dense subnet: the plain network that is left when all units outside the task's mask are taken out."""

import lazy_loader

from avalanche_amnesia.contrib.export import entries, shrunk_layers

_ = (entries, shrunk_layers)  # imported for their registrations: every walk needs them
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
