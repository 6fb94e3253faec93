from .offline import OfflineRun as OfflineRun
from .offline import OfflineRunError as OfflineRunError
from .offline import read_offline_run as read_offline_run
from .wandb import WandBLogger as WandBLogger
