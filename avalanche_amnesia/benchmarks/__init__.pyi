from .digits import PermutedDigits as PermutedDigits
from .digits import SplitDigits as SplitDigits
from .requests import UnlearningRequest as UnlearningRequest
from .requests import with_unlearning as with_unlearning
from .requests import without_samples as without_samples
from .tasks import task_benchmark as task_benchmark
