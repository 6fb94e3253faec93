from .log_files import TrajectoryError as TrajectoryError
from .removal import Removal as Removal
from .replay import Revision as Revision
from .replay import Revisions as Revisions
from .store import Trajectory as Trajectory
