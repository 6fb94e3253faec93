from .log_files import TrajectoryError as TrajectoryError
from .removal import Removal as Removal
from .removal import Revision as Revision
from .removal import Revisions as Revisions
from .store import Trajectory as Trajectory
