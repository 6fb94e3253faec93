from .store import Trajectory as Trajectory
