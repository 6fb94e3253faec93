from .wandb import WandBLogger as WandBLogger
