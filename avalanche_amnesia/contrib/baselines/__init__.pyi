from .analytic import AnalyticModel as AnalyticModel
from .clpu import CLPUDERpp as CLPUDERpp
from .networks import Independent as Independent
from .networks import NetworkPerTask as NetworkPerTask
from .networks import SideNetworks as SideNetworks
from .pall import PALL as PALL
from .ranpac import RanPAC as RanPAC
