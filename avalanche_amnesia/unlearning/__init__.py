"""Unlearning of tasks, as a plan that is applied as a whole: compensations, purging of hosts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
