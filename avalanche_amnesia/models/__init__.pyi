from .disjoint import DisjointModel as DisjointModel
from .masked import MaskedModel as MaskedModel
from .mlp import MLP as MLP
from .multi_head import MultiHeadModel as MultiHeadModel
from .multi_head import UnknownTaskError as UnknownTaskError
from .subnet import SubnetModel as SubnetModel
from .task_masked import TaskMaskedModel as TaskMaskedModel
from .task_norm import TaskNormModel as TaskNormModel
