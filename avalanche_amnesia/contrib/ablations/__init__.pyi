from .importance import input_gradient as input_gradient
from .importance import output_contribution as output_contribution
from .pruned_updates import PrunedTrajectoryPlugin as PrunedTrajectoryPlugin
from .scaled_updates import ScaledUpdatesPlugin as ScaledUpdatesPlugin
