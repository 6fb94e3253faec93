from .clusters import RayExecutor as RayExecutor
from .clusters import SlurmExecutor as SlurmExecutor
from .jobs import Executor as Executor
from .jobs import Job as Job
from .jobs import JobDone as JobDone
from .jobs import NeedFailedError as NeedFailedError
from .jobs import run_jobs as run_jobs
from .process import ProcessExecutor as ProcessExecutor
