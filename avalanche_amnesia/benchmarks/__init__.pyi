from .digits import PermutedDigits as PermutedDigits
from .digits import SplitDigits as SplitDigits
from .requests import UnlearningRequest as UnlearningRequest
from .requests import with_unlearning as with_unlearning
from .tasks import TaskExperience as TaskExperience
from .tasks import task_benchmark as task_benchmark
