from .clpu import CLPUDERpp as CLPUDERpp
from .clpu import CLPUPlugin as CLPUPlugin
from .dark_replay import DarkReplayPlugin as DarkReplayPlugin
from .networks import Independent as Independent
from .networks import NetworkPerTask as NetworkPerTask
from .networks import SideNetworks as SideNetworks
from .pall import PALL as PALL
from .pall import PALLPlugin as PALLPlugin
