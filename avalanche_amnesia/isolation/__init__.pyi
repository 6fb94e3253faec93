from .pools import Pools as Pools
