from .benchmarks.digits import SplitDigits as SplitDigits
from .benchmarks.requests import UnlearningRequest as UnlearningRequest
from .benchmarks.requests import with_unlearning as with_unlearning
from .benchmarks.tasks import task_benchmark as task_benchmark
from .evaluation.accuracy_difference import accuracy_difference_metrics as accuracy_difference_metrics
from .evaluation.capacity import capacity_metrics as capacity_metrics
from .evaluation.jsd import jsd_metrics as jsd_metrics
from .evaluation.references import References as References
from .ledger import RequestError as RequestError
from .logging.wandb import WandBLogger as WandBLogger
from .models.disjoint import DisjointModel as DisjointModel
from .models.masked import MaskedModel as MaskedModel
from .models.mlp import MLP as MLP
from .models.weight_masks.subnet import SubnetModel as SubnetModel
from .training.amnesiac_hat import AmnesiacHAT as AmnesiacHAT
from .training.disjoint_subnets import DisjointSubnets as DisjointSubnets
from .training.plugins.trajectory import TrajectoryPlugin as TrajectoryPlugin
from .training.plugins.unlearning import UnlearningPlugin as UnlearningPlugin
from .training.strategies import HAT as HAT
from .training.strategies import AdaHAT as AdaHAT
from .training.wsn import WSN as WSN
from .unit_graph.findings import ModelError as ModelError
from .unit_graph.validation import fix as fix
from .unit_graph.validation import validate as validate

__version__: str
