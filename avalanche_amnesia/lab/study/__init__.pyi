from .experiment import cells_of as cells_of
from .settings import Experiment as Experiment
from .settings import MethodSettings as MethodSettings
from .settings import StreamSettings as StreamSettings
from .settings import TrainingSettings as TrainingSettings
from .sweep import sweep as sweep
