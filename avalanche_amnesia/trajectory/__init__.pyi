from .files import TrajectoryError as TrajectoryError
from .removal import Removal as Removal
from .revision import Revision as Revision
from .revision import Revisions as Revisions
from .store import Trajectory as Trajectory
