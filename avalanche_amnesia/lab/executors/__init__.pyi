from .jobs import Executor as Executor
from .jobs import Job as Job
from .jobs import JobDone as JobDone
from .jobs import NeedFailedError as NeedFailedError
from .jobs import run_jobs as run_jobs
from .process import ProcessExecutor as ProcessExecutor
from .ray_cluster import RayExecutor as RayExecutor
from .slurm import SlurmExecutor as SlurmExecutor
